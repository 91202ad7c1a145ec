"""How one step of the scheduler is cut into kernel launches on a GPU (no device, no vLLM).

A *run* is neighbouring requests that one launch serves. Requests are not moved: vLLM puts decodes
first, and a slice of the batch costs nothing where an index would copy queries and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kernels_patch.plan import DECODE, FIRST_CHUNK, PREFIX

PREFIX_UNPACKED = "prefix_unpacked"  # pages unpacked into 16-bit scratch, then FlashAttention


@dataclass(frozen=True)
class Run:
    """Neighbouring requests of one route.

    ``requests`` and ``rows`` pick requests and query tokens out of the batch; ``query_lens`` and
    ``seq_lens`` (history and chunk) are theirs. ``counts`` is true for the first run of its route
    in the step: two runs of one route are one launch in the counters, as they are one step.
    """

    route: str
    requests: slice
    rows: slice
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    counts: bool

    @property
    def num_tokens(self) -> int:
        return self.rows.stop - self.rows.start


def route_of(query_len: int, seq_len: int, short_len: int) -> str:
    """The route of one request.

    One query token is a decode whatever its history: a captured graph cannot tell a prompt of one
    token from a decode. A chunk of at most ``short_len`` tokens with history is read from the INT8
    pages by the decode kernel, its queries masked among themselves.
    """
    if query_len == 1:
        return DECODE
    if query_len == seq_len:
        return FIRST_CHUNK
    return PREFIX if query_len <= short_len else PREFIX_UNPACKED


def plan_runs(
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    *,
    short_len: int,
    scratch_tokens: int,
) -> tuple[Run, ...]:
    """Cut a step of R requests into runs; requests without a query token (padding) are left out.

    query_start_loc: R+1 offsets into the step's query tokens; seq_lens: R lengths of history plus
    chunk. Requests of one ``prefix`` run have equal query lengths, and those of one
    ``prefix_unpacked`` run at most ``scratch_tokens`` tokens together. Raises ValueError when a
    query is longer than its sequence or a sequence longer than the scratch.
    """
    groups: list[tuple[str, list[int]]] = []
    for request, seq_len in enumerate(seq_lens):
        query_len = query_start_loc[request + 1] - query_start_loc[request]
        if query_len == 0:
            continue
        if query_len > seq_len:
            raise ValueError(
                f"request {request} of the step has {query_len} query tokens in a sequence of "
                f"{seq_len}"
            )
        route = route_of(query_len, seq_len, short_len)
        if route == PREFIX_UNPACKED and seq_len > scratch_tokens:
            raise ValueError(
                f"request {request} has {seq_len} tokens, the scratch holds {scratch_tokens}"
            )
        joins = (
            groups
            and groups[-1][0] == route
            and groups[-1][1][-1] == request - 1
            and _fits(groups[-1], query_len, seq_len, query_start_loc, seq_lens, scratch_tokens)
        )
        if joins:
            groups[-1][1].append(request)
        else:
            groups.append((route, [request]))
    seen: set[str] = set()
    runs = []
    for route, members in groups:
        first, last = members[0], members[-1]
        starts = query_start_loc[first : last + 2]
        runs.append(
            Run(
                route=route,
                requests=slice(first, last + 1),
                rows=slice(starts[0], starts[-1]),
                query_lens=tuple(b - a for a, b in pairwise(starts)),
                seq_lens=tuple(seq_lens[first : last + 1]),
                counts=route not in seen,
            )
        )
        seen.add(route)
    return tuple(runs)


def _fits(
    group: tuple[str, list[int]],
    query_len: int,
    seq_len: int,
    query_start_loc: Sequence[int],
    seq_lens: Sequence[int],
    scratch_tokens: int,
) -> bool:
    route, members = group
    if route == PREFIX:
        first = members[0]
        return query_len == query_start_loc[first + 1] - query_start_loc[first]
    if route == PREFIX_UNPACKED:
        return seq_len + sum(seq_lens[member] for member in members) <= scratch_tokens
    return True
