"""The native kernels called from several Python threads at once: ctypes lets go of the GIL."""

from concurrent.futures import ThreadPoolExecutor

import torch

from kernels_patch import check, native


def attend(batch: check.Batch) -> list[torch.Tensor]:
    """The written pages and every route's output over a batch's requests."""
    kernels = native.load()
    cache = batch.kv_cache.clone()
    keys, values = torch.cat(batch.keys), torch.cat(batch.values)
    kernels.write_kv(keys, values, cache, batch.slots)
    chunks = torch.full_like(batch.query, torch.nan)
    kernels.prefix(
        batch.query,
        cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        batch.sm_scale,
        chunks,
    )
    last = batch.query[(batch.query_start_loc[1:] - 1).long()]
    tokens = torch.full_like(last, torch.nan)
    kernels.decode(last, cache, batch.block_table, batch.seq_lens, batch.sm_scale, tokens)
    starts = torch.tensor([0, *(len(key) for key in batch.keys)]).cumsum(0).int()
    query = torch.ones(len(keys), batch.case.n_heads, batch.case.head_dim, dtype=keys.dtype)
    first = torch.full_like(query, torch.nan)
    kernels.first_chunk(query, keys, values, starts, batch.sm_scale, first)
    return [cache, chunks, tokens, first]


def test_calls_from_many_threads_give_the_bits_of_one():
    batches = [check.make_batch(case) for case in check.list_cases(quick=True)]
    alone = [attend(batch) for batch in batches]
    turns = [i % len(batches) for i in range(40)]
    with ThreadPoolExecutor(max_workers=6) as pool:
        together = list(pool.map(lambda turn: attend(batches[turn]), turns))
    for turn, tensors in zip(turns, together, strict=True):
        assert all(map(torch.equal, tensors, alone[turn]))
