"""The four tasks, one file each: prompt, post-processing, scoring version and embedded generator.

Installed as ``evalgate_tasks``. Knows no server, no record and no file.
"""
