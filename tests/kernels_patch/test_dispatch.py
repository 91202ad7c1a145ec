"""Which implementation serves, under which route, and a mixed step end to end without vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels_patch import dispatch, native, reference
from kernels_patch.plan import plan_step
from kernels_patch.switches import RefusalError

BLOCK = 32


@pytest.fixture(autouse=True)
def fresh_choice():
    dispatch.choose_kernels.cache_clear()
    yield
    dispatch.choose_kernels.cache_clear()


def without_native(monkeypatch):
    def load():
        raise native.NativeUnavailable("no C++ compiler built them")

    monkeypatch.setattr(native, "load", load)


def with_native(monkeypatch):
    """Native kernels that load and are never called."""

    def kernel(*arguments):
        raise AssertionError("a stand-in kernel was called")

    functions = dict.fromkeys(("write_kv", "first_chunk", "prefix", "decode"), kernel)
    stand_in = SimpleNamespace(isa="stand-in", **functions)
    monkeypatch.setattr(native, "load", lambda: stand_in)


def test_native_kernels_serve_under_their_own_routes(monkeypatch, capsys):
    with_native(monkeypatch)
    kernels = dispatch.choose_kernels(64)
    assert kernels.impl == "native"
    assert kernels.labels == {"first_chunk": "first_chunk", "prefix": "prefix", "decode": "decode"}
    assert "kernels_patch: serving with the native stand-in kernels" in capsys.readouterr().err


def test_without_native_the_torch_form_serves_loudly_under_routes_of_its_own(monkeypatch, capsys):
    without_native(monkeypatch)
    kernels = dispatch.choose_kernels(64)
    assert kernels.impl == "torch"
    assert kernels.labels["prefix"] == "prefix_torch"
    assert kernels.labels["decode"] == "decode_torch"
    assert "NO NATIVE KERNELS: no C++ compiler built them" in capsys.readouterr().err


def test_a_choice_is_said_once_for_a_shape(monkeypatch, capsys):
    without_native(monkeypatch)
    for _ in range(30):
        dispatch.choose_kernels(64)
    assert capsys.readouterr().err.count("NO NATIVE KERNELS") == 1


def test_a_shape_beyond_the_native_kernels_is_counted_as_fallback(monkeypatch, capsys):
    with_native(monkeypatch)
    kernels = dispatch.choose_kernels(native.MAX_HEAD_DIM + 8)
    assert kernels.impl == "torch"
    assert kernels.labels == {
        "first_chunk": "first_chunk",
        "prefix": "fallback",
        "decode": "fallback",
    }
    assert f"head size {native.MAX_HEAD_DIM + 8} is beyond" in capsys.readouterr().err


def test_an_instruction_set_that_is_forced_and_not_there_refuses(monkeypatch):
    native.load.cache_clear()
    monkeypatch.setenv("KERNELS_PATCH_ISA", "avx1024")
    with pytest.raises(RefusalError, match="KERNELS_PATCH_ISA=avx1024 was asked for, and"):
        dispatch.choose_kernels(64)
    native.load.cache_clear()


def test_native_kernels_that_are_forced_and_missing_refuse(monkeypatch):
    without_native(monkeypatch)
    monkeypatch.setenv("KERNELS_PATCH_IMPL", "native")
    with pytest.raises(RefusalError, match="native was asked for, and no C"):
        dispatch.choose_kernels(64)


def test_the_torch_form_can_be_forced_where_native_loads(monkeypatch):
    with_native(monkeypatch)
    monkeypatch.setenv("KERNELS_PATCH_IMPL", "torch")
    assert dispatch.choose_kernels(64).labels["decode"] == "decode_torch"


def test_an_unknown_implementation_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("KERNELS_PATCH_IMPL", "cuda")
    with pytest.raises(RefusalError, match="'cuda' is unknown"):
        dispatch.choose_kernels(64)


@pytest.mark.parametrize("impl", ["torch", "native"])
def test_a_step_of_decodes_is_one_call_where_nothing_comes_between_write_and_attention(
    monkeypatch, impl
):
    monkeypatch.setenv("KERNELS_PATCH_IMPL", impl)
    kernels = dispatch.choose_kernels(16)
    torch.manual_seed(2)
    table = torch.tensor([[1, 3], [2, 0]], dtype=torch.int32)
    history = torch.zeros((4, 2, BLOCK, 40), dtype=torch.int8)
    kernels.write_kv(*torch.randn(2, 4 * BLOCK, 2, 16), history, torch.arange(4 * BLOCK))
    query, key, value = torch.randn(3, 4, 16), *torch.randn(2, 3, 2, 16)
    slots = torch.tensor([1 * BLOCK + 7, 0 * BLOCK + 3, -1])  # the last row is padding
    batches = plan_step([0, 1, 2], [8, BLOCK + 4], table)
    step = dispatch.prepare_step(kernels, slots, batches)
    assert (step.tables is not None) == (impl == "native")
    caches, outs, seen = [history.clone(), history.clone()], [], []
    for cache, after_write in zip(caches, (None, lambda *given: seen.append(given)), strict=True):
        outs.append(torch.full_like(query, 9.0))
        tensors = (query, key, value, cache)
        dispatch.run_step(kernels, step, *tensors, 0.25, outs[-1], after_write)
    assert seen == [(caches[1], slots)]
    assert torch.equal(*caches)
    assert torch.equal(*outs)
    assert not torch.equal(caches[0], history)
    assert (outs[0][2] == 9).all()


def test_a_step_with_another_route_is_not_one_call(monkeypatch):
    monkeypatch.setenv("KERNELS_PATCH_IMPL", "native")
    kernels = dispatch.choose_kernels(16)
    table = torch.zeros((2, 2), dtype=torch.int32)
    mixed = plan_step([0, 1, 4], [8, 9], table)
    assert [batch.route for batch in mixed] == ["prefix", "decode"]
    assert dispatch.prepare_step(kernels, torch.arange(4), mixed).tables is None


@pytest.mark.parametrize("impl", ["torch", "native"])
def test_requests_of_all_routes_mixed_in_one_step_get_their_own_rows(monkeypatch, impl):
    monkeypatch.setenv("KERNELS_PATCH_IMPL", impl)
    kernels = dispatch.choose_kernels(16)
    torch.manual_seed(1)
    query_lens, seq_lens = [1, 5, 1, 33, 1, 7], [40, 70, 1, 33, 300, 264]
    starts = [0, *np.cumsum(query_lens).tolist()]
    table = torch.randperm(6 * 10).view(6, 10).int()
    cache = torch.full((60, 2, BLOCK, 40), -1, dtype=torch.int8)
    query = torch.randn(starts[-1], 4, 16)
    key, value = torch.empty(2, starts[-1], 2, 16)
    keys, values = [], []
    for n, seq_len in enumerate(seq_lens):
        k, v = torch.randn(2, seq_len, 2, 16)
        position = torch.arange(seq_len)
        kernels.write_kv(k, v, cache, table[n, position // BLOCK].long() * BLOCK + position % BLOCK)
        key[starts[n] : starts[n + 1]] = k[seq_len - query_lens[n] :]
        value[starts[n] : starts[n + 1]] = v[seq_len - query_lens[n] :]
        keys.append(k.numpy())
        values.append(v.numpy())
    out = torch.full_like(query, torch.nan)
    batches = plan_step(starts, seq_lens, table)
    assert {b.route for b in batches} == {"first_chunk", "prefix", "decode"}
    for batch in batches:
        dispatch.run_batch(kernels, batch, query, key, value, cache, 0.25, out)
    for n in range(6):
        rows = slice(starts[n], starts[n + 1])
        exact = reference.attention(query[rows].numpy(), keys[n], values[n], 0.25)
        # Another request's rows would be off by the order of the values, 1.
        np.testing.assert_allclose(out[rows].numpy(), exact, atol=0.06)
