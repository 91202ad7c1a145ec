"""Which request of a step takes which route; made once for a step and shared by all its layers.

It knows the batch's shape only: neither queries nor pages, neither layers nor kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FIRST_CHUNK = "first_chunk"
PREFIX = "prefix"
DECODE = "decode"


@dataclass(frozen=True)
class RouteBatch:
    """The requests of one step that take one route, in batch order.

    ``rows`` picks their N requests' T query tokens out of the batch: a slice when they lie side by
    side, else an int64 index. ``query_start_loc`` [N+1] counts from the first of these rows,
    ``seq_lens`` [N] counts history and chunk, ``block_table`` is [N, M]; all int32.
    """

    route: str
    rows: slice | torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    @property
    def num_requests(self) -> int:
        return self.seq_lens.numel()

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])


def route_of(query_len: int, seq_len: int) -> str:
    """The route of one request.

    One query token is a decode whatever its history, as on a GPU, where a captured graph cannot
    tell a prompt of one token from a decode; a longer chunk without history is a first chunk.
    """
    if query_len == 1:
        return DECODE
    return FIRST_CHUNK if seq_len == query_len else PREFIX


def plan_step(
    query_start_loc: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor
) -> tuple[RouteBatch, ...]:
    """Split a step of R requests by route; requests without a query token (padding) are left out.

    query_start_loc: R+1 offsets into the step's query tokens; seq_lens: R lengths of history plus
    chunk; block_table: int32 [R, M]. Raises ValueError when a request's query is longer than its
    sequence.
    """
    members: dict[str, list[int]] = {FIRST_CHUNK: [], PREFIX: [], DECODE: []}
    for request, seq_len in enumerate(seq_lens):
        query_len = query_start_loc[request + 1] - query_start_loc[request]
        if query_len > seq_len:
            raise ValueError(
                f"request {request} of the step has {query_len} query tokens in a sequence of "
                f"{seq_len}"
            )
        if query_len > 0:
            members[route_of(query_len, seq_len)].append(request)
    return tuple(
        _select(route, requests, query_start_loc, seq_lens, block_table)
        for route, requests in members.items()
        if requests
    )


def _select(
    route: str,
    requests: list[int],
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
) -> RouteBatch:
    spans = [(query_start_loc[r], query_start_loc[r + 1]) for r in requests]
    starts = [0]
    for begin, end in spans:
        starts.append(starts[-1] + end - begin)
    first, last = spans[0][0], spans[-1][1]
    side_by_side = last - first == starts[-1]
    rows: slice | torch.Tensor = slice(first, last)
    if not side_by_side:
        rows = torch.cat([torch.arange(begin, end) for begin, end in spans])
    return RouteBatch(
        route=route,
        rows=rows,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([seq_lens[r] for r in requests], dtype=torch.int32),
        block_table=block_table[torch.tensor(requests)].contiguous(),
    )
