"""A step of decodes in one native call: it is the two calls, and it trusts no tensor."""

import pytest
import torch

from kernels_patch import check, native
from kernels_patch.check import Case


@pytest.fixture(params=native.list_instruction_sets())
def kernels(request):
    return native.load(request.param)


def make_step(case: Case):
    """Written histories, and the last token of each request still to be written: arguments of
    ``write_and_decode``, and the slots and tables that it takes as ``tables``."""
    batch = check.make_batch(case)
    history = torch.cat([torch.arange(n) < n - 1 for _, n in case.requests])
    native.load().write_kv(
        *(torch.cat(x)[history] for x in (batch.keys, batch.values)),
        batch.kv_cache,
        batch.slots[history],
    )
    arguments = {
        "query": batch.query,
        "key": torch.stack([x[-1] for x in batch.keys]),
        "value": torch.stack([x[-1] for x in batch.values]),
        "kv_cache": batch.kv_cache,
        "sm_scale": batch.sm_scale,
        "out": torch.full_like(batch.query, float("nan")),
    }
    return arguments, (batch.slots[~history], batch.block_table, batch.seq_lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(1,), (33,), (128, 1, 257, 1025)])
def test_one_call_does_what_two_do(kernels, lengths, dtype):
    case = Case("step", 6, 2, 64, 128, tuple((1, n) for n in lengths), dtype)
    step, (slots, table, seq_lens) = make_step(case)
    cache, out = step["kv_cache"].clone(), torch.empty_like(step["out"])
    kernels.write_kv(step["key"], step["value"], cache, slots)
    kernels.decode(step["query"], cache, table, seq_lens, step["sm_scale"], out)
    kernels.write_and_decode(**step, tables=native.prepare_decode(slots, table, seq_lens))
    assert torch.equal(step["kv_cache"], cache)
    assert torch.equal(step["out"], out)


def test_rows_of_a_fused_projection_are_read_where_they_lie(kernels):
    step, tables = make_step(Case("views", 4, 2, 32, 64, ((1, 90), (1, 40))))
    fused = torch.cat([step[x].flatten(1) for x in ("query", "key", "value")], dim=1)
    query, key, value = fused.split([128, 64, 64], dim=1)
    views = {
        "query": query.view(2, 4, 32),
        "key": key.view(2, 2, 32),
        "value": value.view(2, 2, 32),
        "kv_cache": step["kv_cache"].clone(),
        "out": torch.empty_like(step["out"]),
    }
    tables = native.prepare_decode(*tables)
    kernels.write_and_decode(**step, tables=tables)
    kernels.write_and_decode(**step | views, tables=tables)
    assert torch.equal(views["out"], step["out"])
    assert torch.equal(views["kv_cache"], step["kv_cache"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"query": s["query"].bfloat16()}, "do not fit query .* torch.bfloat16"),
        (lambda s: {"key": s["key"].bfloat16()}, "key .* torch.bfloat16"),
        (lambda s: {"value": s["value"][:, :1]}, "value .* do not fit"),
        (lambda s: {"out": s["out"][..., :8]}, "do not fit"),
        (lambda s: {x: s[x][:1] for x in ("query", "key", "value", "out")}, "1 rows for the 2"),
        (lambda s: {"key": s["key"].mT}, "key is .* contiguous last axis"),
        (lambda s: {"kv_cache": s["kv_cache"].float()}, "kv_cache is torch.float32"),
        (lambda s: {"kv_cache": s["kv_cache"][:1]}, "slot .* is beyond the cache's 1 blocks"),
    ],
)
def test_an_unusable_tensor_is_named(change, message):
    step, tables = make_step(Case("wrong", 2, 2, 16, 32, ((1, 40), (1, 50))))
    with pytest.raises(ValueError, match=message):
        native.load().write_and_decode(**step | change(step), tables=native.prepare_decode(*tables))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slot_mapping is torch.int32"),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, r"slot_mapping is .* give .*\(2,\)"),
        ({"table": torch.zeros(1, 4, dtype=torch.int32)}, "block_table is"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "seq_lens is torch.int64"),
    ],
)
def test_unusable_tables_are_named(change, message):
    tables = {
        "slots": torch.zeros(2, dtype=torch.int64),
        "table": torch.zeros(2, 4, dtype=torch.int32),
        "lengths": torch.ones(2, dtype=torch.int32),
    }
    native.prepare_decode(*tables.values())
    with pytest.raises(ValueError, match=message):
        native.prepare_decode(*(tables | change).values())


def test_a_block_beyond_the_cache_is_refused(kernels):
    step, (slots, table, seq_lens) = make_step(Case("beyond", 2, 1, 16, 32, ((1, 40),)))
    table[0, 0] = 1000  # the token's own slot is in the second block
    with pytest.raises(ValueError, match="block_table names a block beyond"):
        kernels.write_and_decode(**step, tables=native.prepare_decode(slots, table, seq_lens))
