"""Run by test_gpu_triton.py with Triton's interpreter on: the Triton kernels' own code on a CPU.

The written pages are compared byte for byte with the reference's, tokens out of order and pages
poisoned; what is unpacked with what was written.
"""

import numpy as np
import torch

from kernels_patch import reference
from kernels_patch.gpu.layout import UnitLayout
from kernels_patch.gpu.prefix import dequantise
from kernels_patch.gpu.producer import int8_write
from kernels_patch.gpu.tuning import FEW_TOKENS

HEADS, DIM, PAGE, PAGES = 2, 64, 32, 7
TABLE = [[3, 1, 4, 6], [5, 0, 2, -1]]
LENS = [FEW_TOKENS + 35, 50]


def main() -> None:
    rng = np.random.default_rng(0)
    layout = UnitLayout(PAGE, DIM)
    cache = torch.full((PAGES, HEADS, PAGE, layout.bytes_per_token), -128, dtype=torch.int8)
    before = cache.numpy().copy()
    unpacked = []
    for pages, length in zip(TABLE, LENS, strict=True):
        x = rng.standard_normal((2, length, HEADS, DIM)).astype(np.float32)
        x[0, 3] = 0  # amax 0
        key, value = (torch.from_numpy(part).bfloat16() for part in x)
        slots = [pages[t // PAGE] * PAGE + t % PAGE for t in range(length)]
        shown = torch.tensor(slots)
        shown[1] = -1  # padding: skipped here, written below
        int8_write(key, value, cache, shown)
        int8_write(key[1:2], value[1:2], cache, torch.tensor(slots[1:2]))
        for part, index, scale_index in (
            (key, layout.k_index, layout.k_scale_index),
            (value, layout.v_index, layout.v_scale_index),
        ):
            payload, scales = reference.quantise(part.float().numpy())
            for token, slot in enumerate(slots):
                for head in range(HEADS):
                    page = before[slot // PAGE, head].reshape(-1)
                    page[index[slot % PAGE]] = payload[token, head]
                    at = scale_index[slot % PAGE]
                    page[at : at + 4] = scales[token, head].reshape(1).view(np.int8)
            unpacked.append(payload * scales[..., None])
    assert (cache.numpy() == before).all(), f"{(cache.numpy() != before).sum()} bytes differ"

    ticks = torch.tensor([41])
    for ticked in (None, ticks):
        got = torch.full((2, sum(LENS), HEADS, DIM), float("nan"), dtype=torch.float16)
        dequantise(
            cache,
            torch.tensor(TABLE, dtype=torch.int32),
            torch.tensor(LENS, dtype=torch.int32),
            torch.tensor([0, LENS[0]], dtype=torch.int32),
            max(LENS),
            *got,
            ticks=ticked,
        )
        for part, want in zip(got, (unpacked[0::2], unpacked[1::2]), strict=True):
            assert (part.numpy() == np.concatenate(want).astype(np.float16)).all()
    assert ticks.tolist() == [42]
    print("interpreted")


if __name__ == "__main__":
    main()
