"""INT8 KV-cache attention kernels, patched into a stock vLLM by a plug-in.

``layout`` <- {``reference``, ``fragment``, ``cpu``} <- ``dispatch`` <- ``backend`` <- ``plugin``.
Nothing here knows evalgate: a spec names this package by environment and flags only.
"""

__version__ = "0.1.0"
