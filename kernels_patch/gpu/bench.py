"""Speed of the GPU kernels beside vLLM's: ``python -m kernels_patch.gpu.bench``.

Prints tables, then one line of JSON. Correctness is checked first, and nothing is timed when it
fails. Every figure is the median time of one call inside a CUDA graph of at least eight calls that
go round over several input sets, four times L2 together, so that no call finds its pages in cache;
the block table is shared by all sets, as the layers of a model share it. The copy bandwidth of the
same run says what the bytes alone would take.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import triton
from triton.testing import do_bench

from kernels_patch.gpu import check, rivals
from kernels_patch.gpu.decode import DecodeWorkspace, build, int8_decode
from kernels_patch.gpu.nvrtc import Build, compile_all
from kernels_patch.gpu.prefix import dequantise
from kernels_patch.gpu.producer import int8_write
from kernels_patch.gpu.rope import int8_rope_write
from kernels_patch.gpu.shape import DecodeShape

L2_TIMES = 4
MIN_CALLS = 8
MAX_SETS = 32
COPY_BYTES = 1 << 31
BLOCK_SIZE = 64
PREFIXES = [(q, n) for q in (4096, 3072, 512) for n in (8192, 16384, 32768)]
LENGTHS = (4096, 8192, 16384, 32768, 131072)
MAIN, WIDE, SMALL = (24, 4, 256), (32, 8, 128), (9, 3, 64)

Call = Callable[[], object]


@dataclass(frozen=True)
class DecodePoint:
    """One decode problem: every request of the batch has ``length`` tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    length: int
    q_len: int = 1
    block_size: int = BLOCK_SIZE

    @property
    def int8_bytes(self) -> int:
        """What attention has to read: payloads and scales of every token."""
        return self.batch * self.length * self.kv_heads * (2 * self.head_dim + 8)

    @property
    def rows(self) -> int:
        return self.q_len * self.heads // self.kv_heads

    def build(self) -> Build:
        """The kernel that ``int8_decode`` will ask for."""
        group = self.heads // self.kv_heads
        return build(DecodeShape(self.head_dim, group, self.q_len, self.block_size).plan())

    def workspace(self) -> DecodeWorkspace:
        device = torch.device("cuda", 0)
        return DecodeWorkspace(device, self.batch, self.kv_heads, self.rows, self.head_dim)

    def __str__(self) -> str:
        name = f"{self.heads}/{self.kv_heads}/{self.head_dim} b{self.batch} {self.length}"
        name += f" q{self.q_len}" if self.q_len > 1 else ""
        return name + (f" page {self.block_size}" if self.block_size != BLOCK_SIZE else "")


def decode_points() -> list[DecodePoint]:
    """Every shape at all lengths and batches; then q_len and pages of the main shape."""
    points = [
        DecodePoint(*shape, batch, n)
        for shape in (MAIN, WIDE, SMALL)
        for batch in (1, 2, 10)
        for n in LENGTHS
    ]
    points += [DecodePoint(*MAIN, 1, n, q) for q in (2, 4, 8) for n in (8192, 32768)]
    return points + [DecodePoint(*MAIN, 1, 32768, block_size=size) for size in (16, 784)]


def median_us(calls: Sequence[Call]) -> float:
    """Median time of one call, microseconds, from the replay of a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = -(-MIN_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    ms = do_bench(graph.replay, warmup=15, rep=60, return_mode="median")
    return ms * 1e3 / (rounds * len(calls))


def copy_bytes_a_us() -> float:
    """Device copy, bytes read plus bytes written per microsecond."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * COPY_BYTES / (ms * 1e3)


def sets_for(n_bytes: int) -> int:
    """How many inputs of ``n_bytes`` make up four times L2: 2 to 32."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MAX_SETS, -(-L2_TIMES * l2 // n_bytes)))


class DecodeInputs:
    """Input sets of one point: the same keys and values in BF16 pages and in INT8 pages."""

    def __init__(self, point: DecodePoint, sets: int | None = None) -> None:
        self.point = point
        pages = -(-point.length // point.block_size) * point.batch
        self.block_table = torch.randperm(pages, device="cuda").int().view(point.batch, -1)
        self.seq_lens = torch.full((point.batch,), point.length, dtype=torch.int32, device="cuda")
        self.sets = []
        slots = torch.arange(pages * point.block_size, device="cuda")
        tail = (point.kv_heads, point.head_dim)
        for _ in range(sets or sets_for(point.int8_bytes)):
            q = torch.randn(
                point.batch * point.q_len, point.heads, point.head_dim,
                device="cuda", dtype=torch.bfloat16,
            )  # fmt: skip
            key = torch.randn(len(slots), *tail, device="cuda", dtype=torch.bfloat16)
            value = torch.randn_like(key)
            cache = torch.empty(
                pages, point.kv_heads, point.block_size, 2 * point.head_dim + 8,
                device="cuda", dtype=torch.int8,
            )  # fmt: skip
            int8_write(key, value, cache, slots)
            paged = (pages, point.block_size, *tail)
            self.sets.append((q, key.view(paged), value.view(paged), cache, torch.empty_like(q)))

    def int8_calls(self, workspace: DecodeWorkspace) -> list[Call]:
        def call(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> Call:
            return lambda: int8_decode(
                q, cache, self.block_table, self.seq_lens, out,
                q_len=self.point.q_len, sm_scale=self.point.head_dim**-0.5, workspace=workspace,
            )  # fmt: skip

        return [call(q, cache, out) for q, _, _, cache, out in self.sets]

    def rival_calls(self, make: Callable[..., Call]) -> list[Call]:
        return [
            make(q, key, value, self.block_table, self.seq_lens, self.point.q_len, out)
            for q, key, value, _, out in self.sets
        ]

    def first_output(self) -> torch.Tensor:
        return self.sets[0][-1].float()


def measure_decode(point: DecodePoint, with_rivals: bool, copy_rate: float) -> dict:
    """Times in microseconds; ``difference`` is the relative RMS of INT8 against BF16 outputs."""
    inputs = DecodeInputs(point)
    workspace = point.workspace()
    row = {"point": str(point), **asdict(point), "int8_us": median_us(inputs.int8_calls(workspace))}
    row["limit_us"] = point.int8_bytes / copy_rate
    row["int8_tb_s"] = point.int8_bytes / row["int8_us"] / 1e6
    if with_rivals:
        ours = inputs.first_output()
        row["fa3_us"] = median_us(inputs.rival_calls(rivals.flash_attention))
        exact = inputs.first_output()
        row["difference"] = float((ours - exact).norm() / exact.norm())
        row["stock_int8_us"] = median_us(inputs.rival_calls(rivals.stock_int8))
    return row


def measure_write(n_tokens: int, shape: tuple[int, int, int], offset: int, rival: bool) -> dict:
    """The cache write of ``n_tokens`` tokens to neighbouring slots from ``offset`` on."""
    _, kv_heads, head_dim = shape
    pages = -(-(n_tokens + offset) // BLOCK_SIZE) + 1
    slots = torch.arange(n_tokens, device="cuda") + offset
    ours, theirs = [], []
    for _ in range(sets_for(4 * n_tokens * kv_heads * head_dim)):
        key = torch.randn(n_tokens, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        value = torch.randn_like(key)
        cache = torch.empty(
            pages, kv_heads, BLOCK_SIZE, 2 * head_dim + 8, device="cuda", dtype=torch.int8
        )
        ours.append(lambda k=key, v=value, c=cache: int8_write(k, v, c, slots))
        if rival:
            paged = (pages, BLOCK_SIZE, kv_heads, head_dim)
            k_cache = torch.empty(paged, device="cuda", dtype=torch.bfloat16)
            theirs.append(rivals.bf16_write(key, value, k_cache, torch.empty_like(k_cache), slots))
    row = {"tokens": n_tokens, "shape": shape, "offset": offset, "int8_us": median_us(ours)}
    if rival:
        row["bf16_us"] = median_us(theirs)
    return row


def lifecycle_points() -> list[DecodePoint]:
    points = [(1, 4096), (1, 8192), (1, 32768), (2, 8192), (2, 16384), (10, 8192)]
    return [DecodePoint(*MAIN, batch, length) for batch, length in points] + [
        DecodePoint(*shape, 1, length) for shape in (WIDE, SMALL) for length in (8192, 32768)
    ]


def measure_lifecycle(point: DecodePoint) -> dict:
    """RoPE and write of the new tokens, then attention: all kernels of a side in one graph.

    ``int8_us`` has RoPE within our cache write, ``int8_apart_us`` vLLM's own before it, which is
    what a model gets without vLLM's fusion; ``bf16_us`` is vLLM's own three. ``differ`` counts the
    elements of queries, keys and pages in which the first two differ, by the angles of a model. As
    every call rotates the same queries and keys again, quarter turns are timed: they are exact.
    """
    inputs = DecodeInputs(point)
    workspace = point.workspace()
    last = (point.length - 1) // point.block_size
    slots = inputs.block_table[:, last].long() * point.block_size
    slots += (point.length - 1) % point.block_size
    key = torch.randn(
        point.batch, point.kv_heads, point.head_dim, device="cuda", dtype=torch.bfloat16
    )
    value = torch.randn_like(key)
    positions = torch.full_like(slots, point.length - 1)
    angles = torch.arange(point.length, device="cuda")[:, None] * 10000.0 ** -(
        torch.arange(0, point.head_dim, 2, device="cuda") / point.head_dim
    )
    model = torch.cat([angles.cos(), angles.sin()], dim=1).bfloat16()
    turns = torch.randint(4, angles.shape, device="cuda") * (math.pi / 2)
    exact = torch.cat([turns.cos(), turns.sin()], dim=1).round().bfloat16()

    def fused(q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, cos_sin: torch.Tensor) -> Call:
        return lambda: int8_rope_write(q, k, value, positions, cos_sin, True, cache, slots)

    def rope(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> Call:
        return rivals.rotary_embedding(q, k, positions, cos_sin)

    def write(k: torch.Tensor, cache: torch.Tensor) -> Call:
        return lambda: int8_write(k, value, cache, slots)

    q, _, _, cache, _ = inputs.sets[0]
    one, other = ([x.clone() for x in (q, key, cache)] for _ in range(2))
    fused(*one, model)()
    rope(*other[:2], model)()
    write(*other[1:])()
    ours, apart, theirs = [], [], []
    attention = inputs.int8_calls(workspace), inputs.rival_calls(rivals.flash_attention)
    for (q, k_cache, v_cache, cache, _), int8, flash in zip(inputs.sets, *attention, strict=True):
        turned = rope(q, key, exact)
        ours += [fused(q, key, cache, exact), int8]
        apart += [turned, write(key, cache), int8]
        theirs += [turned, rivals.bf16_write(key, value, k_cache, v_cache, slots), flash]
    return {
        "point": str(point),
        "int8_us": 2 * median_us(ours),
        "int8_apart_us": 3 * median_us(apart),
        "bf16_us": 3 * median_us(theirs),
        "differ": sum(int((a != b).sum()) for a, b in zip(one, other, strict=True)),
    }


def measure_prefix(n_queries: int, length: int) -> dict:
    """FlashAttention-3 over BF16 pages, and over scratch that INT8 pages are unpacked into."""
    point = DecodePoint(*MAIN, 1, length, n_queries)
    inputs = DecodeInputs(point, sets=2)
    scratch = [
        torch.empty(length, point.kv_heads, point.head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    ]
    start = torch.zeros(1, dtype=torch.int32, device="cuda")
    unpack, unpack_and_attend = [], []
    for q, _, _, cache, out in inputs.sets:
        flash = rivals.flash_attention_contiguous(q, *scratch, out)
        unpack.append(
            lambda c=cache: dequantise(
                c, inputs.block_table, inputs.seq_lens, start, length, *scratch
            )
        )
        unpack_and_attend += [unpack[-1], flash]
    return {
        "queries": n_queries,
        "length": length,
        "bf16_us": median_us(inputs.rival_calls(rivals.flash_attention)),
        "first_form_us": 2 * median_us(unpack_and_attend),
        "unpack_us": median_us(unpack),
    }


def main() -> int:
    if check.main():
        print("the kernels are not correct here: nothing is timed", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    compile_all(point.build() for point in decode_points())
    vllm = rivals.installed()
    copy_rate = copy_bytes_a_us()
    report: dict = {
        "command": "python -m kernels_patch.gpu.bench",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm,
        "copy_tb_s": copy_rate / 1e6,
    }
    print(json.dumps(report))
    print(f"{'decode':28}{'INT8 us':>9}{'TB/s':>7}{'limit':>8}{'FA3 us':>9}{'stock':>9}{'diff':>9}")
    report["decode"] = []
    for point in decode_points():
        row = measure_decode(point, vllm is not None, copy_rate)
        report["decode"].append(row)
        print(
            f"{row['point']:28}{row['int8_us']:9.2f}{row['int8_tb_s']:7.2f}{row['limit_us']:8.2f}"
            f"{_us(row, 'fa3_us')}{_us(row, 'stock_int8_us')}{row.get('difference', 0):9.4f}",
            flush=True,
        )
    print(f"{'cache write':28}{'INT8 us':>9}{'BF16 us':>9}")
    report["write"] = []
    sizes = (1, 2, 10, 2242, 4096)
    writes = [(MAIN, n, offset) for n in sizes for offset in (0, 5)]
    for shape, n_tokens, offset in [*writes, *((s, n, 0) for s in (WIDE, SMALL) for n in sizes)]:
        row = measure_write(n_tokens, shape, offset, vllm is not None)
        report["write"].append(row)
        name = f"{n_tokens} x {shape[1]}/{shape[2]} from slot {offset}"
        print(f"{name:28}{row['int8_us']:9.2f}{_us(row, 'bf16_us')}", flush=True)
    if vllm:
        print(f"{'rope, write and decode':28}{'INT8 us':>9}{'apart':>9}{'BF16 us':>9}{'differ':>8}")
        report["lifecycle"] = []
        for point in lifecycle_points():
            row = measure_lifecycle(point)
            report["lifecycle"].append(row)
            print(
                f"{row['point']:28}{row['int8_us']:9.2f}{row['int8_apart_us']:9.2f}"
                f"{row['bf16_us']:9.2f}{row['differ']:8}",
                flush=True,
            )
        print(f"{'prefix, first form':28}{'INT8 us':>9}{'BF16 us':>9}{'unpack':>9}")
        report["prefix_first_form"] = []
        for n_queries, length in PREFIXES:
            row = measure_prefix(n_queries, length)
            report["prefix_first_form"].append(row)
            print(
                f"{f'{n_queries} queries of {length}':28}{row['first_form_us']:9.1f}"
                f"{row['bf16_us']:9.1f}{row['unpack_us']:9.1f}",
                flush=True,
            )
    print(json.dumps(report, separators=(",", ":")))
    return 0


def _us(row: dict, key: str) -> str:
    return f"{row[key]:9.2f}" if row.get(key) is not None else f"{'-':>9}"


if __name__ == "__main__":
    sys.exit(main())
