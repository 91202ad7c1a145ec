"""Correctness of an implementation on this machine: cases, comparison with float64, error budget.

A case is a batch of requests in a poisoned cache: pages out of order, every byte that no token
owns set to -1 (which makes a scale NaN). Each is compared twice: with the scheme in float64 over
the same bytes (is the implementation right?) and with exact attention (is the scheme good
enough?). Knows the implementations by their four functions only; prints nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels_patch import reference
from kernels_patch.reference import PARTITION_TOKENS, Rounding

# Against the scheme, as shares of the largest |V|. A weight next to a tie may round the other way,
# which moves an output by at most 1/127 of it; nearly all outputs agree far better.
MEDIAN_BOUND = 1e-5
WORST_BOUND = 2 / 127
# Against exact attention over normal activations: a few times what the scheme itself gives.
EXACT_RMS_BOUND = 0.03


class Implementation(Protocol):
    """What ``native`` and ``torch_form`` have in common; see the former for shapes."""

    write_kv: Callable[..., None]
    first_chunk: Callable[..., None]
    prefix: Callable[..., None]
    decode: Callable[..., None]


@dataclass(frozen=True)
class Case:
    """Requests of (query tokens, sequence tokens) over one cache shape."""

    name: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    block_size: int
    requests: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Batch:
    """A case filled with numbers. query is [tokens of all requests, Hq, D]; keys and values hold
    one [S, Hkv, D] a request; slots is int64 [tokens of all sequences]."""

    case: Case
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slots: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def sm_scale(self) -> float:
        return self.case.head_dim**-0.5


@dataclass(frozen=True)
class Result:
    """One comparison; errors are shares of the largest |V| of the case (exact_rms: of the RMS of
    the exact output)."""

    case: str
    route: str
    same_bytes: bool
    median_error: float
    worst_error: float
    exact_rms: float

    @property
    def passed(self) -> bool:
        return (
            self.same_bytes
            and self.median_error <= MEDIAN_BOUND
            and self.worst_error <= WORST_BOUND
            and self.exact_rms <= EXACT_RMS_BOUND
        )


def list_cases(quick: bool = False) -> list[Case]:
    """Lengths on both sides of every block, partition and group boundary, and model shapes."""
    edges = (1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 513)
    cases = [
        Case("edges, decode", 6, 2, 64, 128, tuple((1, n) for n in edges)),
        Case("edges, chunks", 6, 2, 64, 128, tuple((min(n, 33), n) for n in edges)),
        Case("small blocks", 4, 4, 40, 32, ((1, 100), (5, 161), (70, 70))),
        Case("odd blocks, one KV head", 7, 1, 256, 96, ((1, 97), (3, 193), (97, 300))),
        Case("bfloat16", 8, 2, 128, 128, ((1, 300), (40, 290)), torch.bfloat16),
    ]
    if not quick:
        cases += [
            Case("9/3 heads of 64, 4K", 9, 3, 64, 128, ((1, 4096), (64, 4096))),
            Case("32/8 heads of 128, 2K", 32, 8, 128, 128, ((1, 2049), (16, 2048))),
        ]
    return cases


def make_batch(
    case: Case,
    seed: int = 0,
    change: Callable[[list[torch.Tensor]], None] = lambda keys_and_values: None,
) -> Batch:
    """Normal activations in a poisoned, shuffled cache; ``change`` edits keys and values in place
    (all requests' keys, then all values) before anything is written."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, case.head_dim, generator=generator)

    keys = [normal(n, case.n_kv_heads) for _, n in case.requests]
    values = [normal(n, case.n_kv_heads) for _, n in case.requests]
    change([*keys, *values])
    keys = [x.to(case.dtype) for x in keys]
    values = [x.to(case.dtype) for x in values]
    query = normal(sum(q for q, _ in case.requests), case.n_heads).to(case.dtype)

    n_blocks = [-(-n // case.block_size) for _, n in case.requests]
    order = torch.randperm(sum(n_blocks) + 2, generator=generator, dtype=torch.int32)
    block_table = torch.full((len(n_blocks), max(n_blocks)), -1, dtype=torch.int32)
    slots, used = [], 0
    for request, (_, n) in enumerate(case.requests):
        blocks = order[used : used + n_blocks[request]]
        block_table[request, : len(blocks)] = blocks
        used += len(blocks)
        token = torch.arange(n)
        slots.append(blocks[token // case.block_size] * case.block_size + token % case.block_size)
    lengths = torch.tensor([0, *(q for q, _ in case.requests)])
    width = 2 * case.head_dim + 8
    return Batch(
        case=case,
        query=query,
        keys=keys,
        values=values,
        slots=torch.cat(slots).long(),
        kv_cache=torch.full(
            (len(order), case.n_kv_heads, case.block_size, width), -1, dtype=torch.int8
        ),
        block_table=block_table,
        query_start_loc=lengths.cumsum(0).int(),
        seq_lens=torch.tensor([n for _, n in case.requests], dtype=torch.int32),
    )


def check_case(implementation: Implementation, batch: Batch) -> Iterator[Result]:
    """Write the batch, attend it as chunks, and as decode steps of its last tokens; then attend
    every request's keys as a first chunk of their own."""
    cache = batch.kv_cache.clone()
    implementation.write_kv(torch.cat(batch.keys), torch.cat(batch.values), cache, batch.slots)
    wanted = batch.kv_cache.numpy().copy()
    key, value = (torch.cat(x).float().numpy() for x in (batch.keys, batch.values))
    reference.write_kv(key, value, wanted, batch.slots.numpy())
    same_bytes = bool((cache.numpy() == wanted).all())

    out = torch.full_like(batch.query, float("nan"))
    tables = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    implementation.prefix(batch.query, cache, *tables, batch.sm_scale, out)
    ends = batch.query_start_loc.tolist()
    rows = [slice(a, b) for a, b in itertools.pairwise(ends)]
    yield _compare(batch, "prefix", wanted, rows, out, None, same_bytes)

    rows = [slice(b - 1, b) for b in ends[1:]]
    last = torch.cat([batch.query[r] for r in rows])
    out_last = torch.full_like(last, float("nan"))
    implementation.decode(last, cache, batch.block_table, batch.seq_lens, batch.sm_scale, out_last)
    yield _compare(batch, "decode", wanted, rows, out_last, PARTITION_TOKENS, same_bytes)
    yield _check_first_chunk(implementation, batch, same_bytes)


def _check_first_chunk(implementation: Implementation, batch: Batch, same_bytes: bool) -> Result:
    """Queries for the first tokens of each request: at most 300, for the reference's sake."""
    lengths = [min(300, len(key)) for key in batch.keys]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    keys, values = (
        torch.cat([x[:n] for x, n in zip(side, lengths, strict=True)])
        for side in (batch.keys, batch.values)
    )
    generator = torch.Generator().manual_seed(1)
    shape = (sum(lengths), batch.case.n_heads, batch.case.head_dim)
    query = torch.randn(shape, generator=generator).to(batch.case.dtype)
    out = torch.full_like(query, float("nan"))
    implementation.first_chunk(query, keys, values, starts, batch.sm_scale, out)
    exact = np.concatenate(
        [
            reference.attention(
                *(x[a:b].float().numpy() for x in (query, keys, values)), batch.sm_scale
            )
            for a, b in itertools.pairwise(starts.tolist())
        ]
    )
    return _measure(batch, "first_chunk", out, exact, exact, same_bytes)


def _compare(
    batch: Batch,
    route: str,
    kv_cache: np.ndarray,
    rows: list[slice],
    out: torch.Tensor,
    partition: int | None,
    same_bytes: bool,
) -> Result:
    scheme, exact = [], []
    for request, row in enumerate(rows):
        query = batch.query[row].float().numpy()
        seq_len = int(batch.seq_lens[request])
        held = reference.read_kv(kv_cache, batch.block_table[request].numpy(), seq_len)
        scheme.append(
            reference.int8_attention_quantised(query, *held, batch.sm_scale, partition=partition)
        )
        key, value = (x[request].float().numpy() for x in (batch.keys, batch.values))
        exact.append(reference.attention(query, key, value, batch.sm_scale))
    wanted, ideal = np.concatenate(scheme), np.concatenate(exact)
    return _measure(batch, route, out, wanted, ideal, same_bytes)


def _measure(
    batch: Batch,
    route: str,
    out: torch.Tensor,
    wanted: np.ndarray,
    ideal: np.ndarray,
    same_bytes: bool,
) -> Result:
    """How far ``out`` is from what the route should give, and from exact attention."""
    largest = max(float(x.abs().max()) for x in batch.values) or 1.0
    # What bfloat16 rounds off the output itself (half of its last place) is nobody's error.
    slack = 2.0**-8 if out.dtype == torch.bfloat16 else 0.0
    got = out.double().numpy()
    error = np.maximum(np.abs(got - wanted) - slack * np.abs(wanted), 0) / largest
    ideal_rms = float(np.sqrt((ideal**2).mean())) or 1.0
    return Result(
        case=batch.case.name,
        route=route,
        same_bytes=same_bytes,
        median_error=float(np.median(error)),
        worst_error=float(error.max()),
        exact_rms=float(np.sqrt(((got - ideal) ** 2).mean())) / ideal_rms,
    )


def compute_error_budget(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, sm_scale: float
) -> dict[str, float]:
    """What each rounding alone costs: RMS error over RMS of the exact output, for Q, K, V, W, all.

    Shapes as in ``reference``.
    """
    exact = reference.attention(query, key, value, sm_scale)
    switches = {name: Rounding(**{x: x == name for x in "qkvw"}) for name in "qkvw"}
    switches["all"] = Rounding()
    budget = {}
    for name, rounding in switches.items():
        out = reference.int8_attention(query, key, value, sm_scale, rounding=rounding)
        budget[name] = float(np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean()))
    return budget
