"""Faults planted on purpose, to show that an accuracy or speed gate sees them. Never for service.

``KERNELS_PATCH_FAULT`` is one of

``one_sv_after_sum``  PV uses one sV for a page, that of its first token, as if sV were applied once
                      after the sum instead of being folded into every weight
``scale_groups``      scales grouped against the tokens that they are applied to: in each wave of 64
                      tokens the second matrix instruction ({8-15, 24-31, 40-47, 56-63}) takes the K
                      and V scales of the first one's tokens ({0-7, 16-23, 32-39, 48-55})
``sleep:MS``          every step of the model takes MS milliseconds longer

The first two are planted in the scales as they are written, so that they act alike under every
implementation of the kernels: one sV after the sum is the sum with that sV folded into every
weight. This is the only module that knows faults.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kernels_patch.switches import FAULT_SWITCH, RefusalError, say

if TYPE_CHECKING:
    import torch

ONE_SV = "one_sv_after_sum"
SCALE_GROUPS = "scale_groups"
SLEEP = "sleep"
RUN_TOKENS = 8  # tokens that one instruction owns side by side before the other's begin


@dataclass(frozen=True)
class Fault:
    """One planted fault: its name as it was asked for, and for ``sleep`` its length."""

    name: str
    sleep_ms: float = 0.0

    @property
    def spoils_pages(self) -> bool:
        return self.name in (ONE_SV, SCALE_GROUPS)

    def after_write(self, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Spoil the scales of the slots [T] just written to kv_cache int8 [B, Hkv, BS, 2D+8]."""
        if not self.spoils_pages:
            return
        from kernels_patch.torch_form import view_pages

        pages = view_pages(kv_cache)
        slots = slot_mapping.long()
        slots = slots[slots >= 0]
        block, position = slots // pages.block_size, slots % pages.block_size
        tables = pages.tables
        if self.name == ONE_SV:
            spoilt, source, scales = position, position * 0, (tables.v_scale,)
        else:
            second = position % (2 * RUN_TOKENS) >= RUN_TOKENS
            block, spoilt = block[second], position[second]
            source, scales = spoilt - RUN_TOKENS, (tables.k_scale, tables.v_scale)
        for where in scales:
            pages.scales[block, :, where[spoilt]] = pages.scales[block, :, where[source]]

    def delay_step(self) -> None:
        """Sleep before a step: at once, as thirty short sleeps take thrice what they were asked."""
        if self.sleep_ms:
            time.sleep(self.sleep_ms / 1e3)


def parse_fault(value: str) -> Fault | None:
    """The fault that ``value`` names, None for "". Raises RefusalError for another value."""
    if value == "":
        return None
    if value in (ONE_SV, SCALE_GROUPS):
        return Fault(value)
    kind, _, length = value.partition(":")
    if kind == SLEEP and length.replace(".", "", 1).isdigit():
        return Fault(value, sleep_ms=float(length))
    raise RefusalError(
        f"{FAULT_SWITCH}={value!r} names no fault: give {ONE_SV}, {SCALE_GROUPS} or sleep:MS"
    )


@cache
def planted_fault() -> Fault | None:
    """The fault that the environment plants in this process; said loudly once."""
    env: Mapping[str, str] = os.environ
    fault = parse_fault(env.get(FAULT_SWITCH, ""))
    if fault is not None:
        say(f"A FAULT IS PLANTED ON PURPOSE: {fault.name}. Outputs or times are wrong by design.")
    return fault
