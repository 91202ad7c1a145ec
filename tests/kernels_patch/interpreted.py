"""Run by test_gpu_triton.py with Triton's interpreter on: the Triton kernels' own code on a CPU.

The written pages are compared byte for byte with the reference's, tokens out of order, pages
poisoned, blocks padded as hybrid models have them; what is unpacked with what was written.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels_patch import reference
from kernels_patch.gpu.layout import UnitLayout
from kernels_patch.gpu.prefix import dequantise
from kernels_patch.gpu.producer import int8_write
from kernels_patch.gpu.tuning import DEFAULT, ProducerTuning

POISON = -128
MANY_TOKENS = max(DEFAULT.write_sizes)  # enough for the tuning of chunks


@dataclass(frozen=True)
class Case:
    """Requests of ``lens`` tokens in the pages of ``table``, blocks ``padding`` bytes apart."""

    head_dim: int
    page: int
    lens: tuple[int, ...]
    table: tuple[tuple[int, ...], ...]
    heads: int = 2
    padding: int = 0
    dtype: torch.dtype = torch.bfloat16
    tuning: ProducerTuning | None = None


CASES = (
    Case(64, 32, (MANY_TOKENS + 34, 50), ((3, 1, 4, 6), (5, 0, 2, -1))),
    Case(128, 48, (97, 3), ((1, 4, 0), (3, -1, -1)), heads=1, padding=320, dtype=torch.float16),
    Case(256, 16, (17, 16), ((2, 0), (1, -1)), padding=16),
    # Sixteen tokens a program: whole units of V are stored at once, in a page of a hybrid model.
    Case(64, 784, (37,), ((1,),), tuning=ProducerTuning(tokens=16, warps=4)),
)


def check(case: Case) -> None:
    rng = np.random.default_rng(0)
    layout = UnitLayout(case.page, case.head_dim)
    blocks = 1 + max(max(pages) for pages in case.table)
    pages_bytes = case.heads * layout.page_bytes
    memory = torch.full((blocks, pages_bytes + case.padding), POISON, dtype=torch.int8)
    cache = memory[:, :pages_bytes].view(blocks, case.heads, case.page, layout.bytes_per_token)
    want = memory.numpy().copy()
    unpacked = []
    for pages, length in zip(case.table, case.lens, strict=True):
        x = rng.standard_normal((2, length, case.heads, case.head_dim)).astype(np.float32)
        x[0, 2] = 0  # amax 0
        key, value = (torch.from_numpy(part).to(case.dtype) for part in x)
        slots = [pages[t // case.page] * case.page + t % case.page for t in range(length)]
        shown = torch.tensor(slots)
        shown[1] = -1  # padding: skipped here, written below
        int8_write(key, value, cache, shown, case.tuning)
        int8_write(key[1:2], value[1:2], cache, torch.tensor(slots[1:2]))
        for part, index, scale_index in (
            (key, layout.k_index, layout.k_scale_index),
            (value, layout.v_index, layout.v_scale_index),
        ):
            payload, scales = reference.quantise(part.float().numpy())
            for token, slot in enumerate(slots):
                block = want[slot // case.page, :pages_bytes].reshape(case.heads, -1)
                for head in range(case.heads):
                    page, at = block[head], scale_index[slot % case.page]
                    page[index[slot % case.page]] = payload[token, head]
                    page[at : at + 4] = scales[token, head].reshape(1).view(np.int8)
            unpacked.append(payload * scales[..., None])
    assert (memory.numpy() == want).all(), f"{(memory.numpy() != want).sum()} bytes differ"

    ticks = torch.tensor([41])
    for ticked in (None, ticks):
        shape = (2, sum(case.lens), case.heads, case.head_dim)
        got = torch.full(shape, float("nan"), dtype=torch.float16)
        dequantise(
            cache,
            torch.tensor(case.table, dtype=torch.int32),
            torch.tensor(case.lens, dtype=torch.int32),
            torch.tensor([0, *np.cumsum(case.lens)[:-1]], dtype=torch.int32),
            max(case.lens),
            *got,
            ticks=ticked,
        )
        for part, wanted in zip(got, (unpacked[0::2], unpacked[1::2]), strict=True):
            assert (part.numpy() == np.concatenate(wanted).astype(np.float16)).all()
    assert ticks.tolist() == [42]


def main() -> None:
    for case in CASES:
        check(case)
    print("interpreted")


if __name__ == "__main__":
    main()
