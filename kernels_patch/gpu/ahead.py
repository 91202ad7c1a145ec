"""Every kernel compiled and loaded before the server is ready, not in somebody's first request.

Triton compiles a kernel for each pattern of its arguments at its first launch, so each pattern that
serving can meet is launched once, on a page of its own that is thrown away.
"""

from __future__ import annotations

import torch
import triton

from kernels_patch.gpu.decode import prepare
from kernels_patch.gpu.device import table_of
from kernels_patch.gpu.layout import UnitLayout
from kernels_patch.gpu.prefix import dequantise
from kernels_patch.gpu.producer import int8_write
from kernels_patch.gpu.rope import int8_rope_write
from kernels_patch.gpu.shape import DecodeShape
from kernels_patch.gpu.tuning import describe_unmeasured
from kernels_patch.switches import say


def compile_kernels(
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    longest_q: int,
    fuses_rope: bool,
) -> None:
    """The kernels of one shape on ``device``: write, unpacking, decode of 1 to longest_q queries.

    dtype is bfloat16 or float16, ``group`` the query heads of a KV head; with ``fuses_rope`` also
    the write that rotates, in both styles, as none knows yet which the model has. Says it where
    their launch shapes were measured on something else than is here.
    """
    name = torch.cuda.get_device_name(device)
    if note := describe_unmeasured(name, str(torch.__version__), triton.__version__):
        say(note)
    layout = UnitLayout(block_size, head_dim)
    pages = torch.zeros(
        1, kv_heads, block_size, layout.bytes_per_token, dtype=torch.int8, device=device
    )
    for n_tokens in table_of(device).write_sizes:
        x = torch.zeros(n_tokens, kv_heads, head_dim, dtype=dtype, device=device)
        skipped = torch.full((n_tokens,), -1, dtype=torch.int64, device=device)
        int8_write(x, x, pages, skipped)
        if fuses_rope:
            q = torch.zeros(n_tokens, kv_heads * group, head_dim, dtype=dtype, device=device)
            angles = torch.zeros(1, head_dim, dtype=dtype, device=device)
            positions = torch.zeros_like(skipped)
            ticks = torch.zeros(1, dtype=torch.int64, device=device)
            for is_neox in (True, False):
                int8_rope_write(q, x, x, positions, angles, is_neox, pages, skipped, ticks)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    x = torch.zeros(1, kv_heads, head_dim, dtype=dtype, device=device)
    for ticks in (None, torch.zeros(1, dtype=torch.int64, device=device)):
        dequantise(pages, zero[:, None], zero + 1, zero, 1, x, torch.empty_like(x), ticks)
    fp16 = dtype == torch.float16
    prepare(
        DecodeShape(head_dim, group, q_len, block_size, fp16) for q_len in range(1, longest_q + 1)
    )
