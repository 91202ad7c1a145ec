"""evalgate: did the served model get faster, and is it as accurate as the baseline build?"""

__version__ = "0.1.0"
