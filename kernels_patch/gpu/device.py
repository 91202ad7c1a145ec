"""Which launch table serves the device that a tensor lies on."""

from __future__ import annotations

from functools import cache

import torch

from kernels_patch.gpu.tuning import DEFAULT, LaunchTable, table_for


@cache
def table_of(device: torch.device) -> LaunchTable:
    """The table of this device; the default one where there is none (Triton's interpreter)."""
    return table_for(torch.cuda.get_device_name(device)) if device.type == "cuda" else DEFAULT
