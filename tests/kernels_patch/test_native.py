"""The compiled kernels, every instruction set that this CPU has, against the scheme in float64."""

import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import emulated
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_patch import build, check, library, native, reference
from kernels_patch.check import Case

EDGES = (1, 2, 31, 32, 33, 63, 65, 127, 128, 129, 255, 256, 257, 385, 511, 512, 513)


@pytest.fixture(params=native.list_instruction_sets())
def kernels(request):
    return native.load(request.param)


def assert_passes(kernels, case, seed=0, change=lambda _: None):
    results = list(check.check_case(kernels, check.make_batch(case, seed, change)))
    assert [r.route for r in results] == ["prefix", "decode", "first_chunk"]
    for result in results:
        assert result.same_bytes, result
        assert result.median_error <= check.MEDIAN_BOUND, result
        assert result.worst_error <= check.WORST_BOUND, result


@pytest.mark.parametrize("block_size", [32, 96, 128, 256])
def test_every_length_around_a_boundary_agrees_with_the_scheme(kernels, block_size):
    decode = Case("decode", 6, 2, 64, block_size, tuple((1, n) for n in EDGES))
    assert_passes(kernels, decode)
    chunks = tuple((min(n, 37), n) for n in EDGES)
    assert_passes(kernels, Case("chunks", 6, 2, 64, block_size, chunks))


@pytest.mark.parametrize("head_dim", [8, 24, 40, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 7, 8])
def test_every_head_size_and_group_of_heads_agrees_with_the_scheme(kernels, head_dim, shared):
    assert_passes(kernels, Case("heads", 2 * shared, 2, head_dim, 64, ((1, 70), (9, 135))))


@pytest.mark.parametrize("isa", native.list_instruction_sets())
def test_products_and_sums_of_every_pair_of_bytes_are_exact(isa, tmp_path):
    flags = build.list_sets(platform.machine())[isa]
    compiler = os.environ.get("CXX", "g++")
    program = emulated.HERE / "dots.cpp"
    target = emulated.compile_program(program, tmp_path / "dots", *flags, compiler=compiler)
    subprocess.run([target], check=True)


def test_bfloat16_in_and_out_agrees_with_the_scheme(kernels):
    assert_passes(kernels, Case("bf16", 6, 2, 64, 128, ((1, 300), (40, 260)), torch.bfloat16))


def test_one_huge_channel_agrees_with_the_scheme(kernels):
    def enlarge(keys_and_values):
        for x in keys_and_values:
            x[..., 3] *= 1000

    assert_passes(kernels, Case("huge", 4, 2, 64, 128, ((1, 300), (9, 140))), change=enlarge)


def test_tokens_of_zeros_agree_with_the_scheme(kernels):
    def clear(keys_and_values):
        for x in keys_and_values:
            x[::3] = 0
            x[32:64] = 0  # a whole group: the largest weight is 0

    assert_passes(kernels, Case("zeros", 4, 2, 64, 128, ((1, 300), (9, 140))), change=clear)


def test_values_of_zero_everywhere_give_zero(kernels):
    batch = check.make_batch(Case("zero", 2, 1, 16, 32, ((5, 40),)))
    batch.values[0].zero_()
    kernels.write_kv(batch.keys[0], batch.values[0], batch.kv_cache, batch.slots)
    out = torch.full_like(batch.query, float("nan"))
    tables = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    kernels.prefix(batch.query, batch.kv_cache, *tables, 0.25, out)
    assert (out == 0).all()


@pytest.mark.parametrize("payload", [-128, 127])
def test_payloads_at_the_ends_of_int8_are_summed_exactly(kernels, payload):
    # No producer writes -128, but a page may hold it; 256 products of 128 * 127 must not saturate.
    batch = check.make_batch(Case("ends", 3, 1, 256, 128, ((1, 200),)))
    kernels.write_kv(batch.keys[0], batch.values[0], batch.kv_cache, batch.slots)
    pages = batch.kv_cache.flatten(2)
    pages[:, :, : 2 * 128 * 256] = payload
    query = torch.ones_like(batch.query)
    out = torch.empty_like(query)
    kernels.decode(query, batch.kv_cache, batch.block_table, batch.seq_lens, 0.01, out)
    held = reference.read_kv(batch.kv_cache.numpy(), batch.block_table[0].numpy(), 200)
    wanted = reference.int8_attention_quantised(query.numpy(), *held, 0.01, partition=256)
    np.testing.assert_allclose(out.numpy(), wanted, rtol=2e-3)


@pytest.mark.parametrize("group", [64, 128])
def test_other_groups_of_weights_agree_with_the_scheme(kernels, group):
    batch = check.make_batch(Case("group", 4, 2, 64, 96, ((30, 400),)))
    kernels.write_kv(batch.keys[0], batch.values[0], batch.kv_cache, batch.slots)
    held = reference.read_kv(batch.kv_cache.numpy(), batch.block_table[0].numpy(), 400)
    wanted = reference.int8_attention_quantised(batch.query.numpy(), *held, 0.125, group=group)
    out = torch.empty_like(batch.query)
    tables = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    kernels.prefix(batch.query, batch.kv_cache, *tables, 0.125, out, group=group)
    assert np.median(np.abs(out.numpy() - wanted)) < 1e-5
    assert np.abs(out.numpy() - wanted).max() < 0.01


def test_strided_views_as_an_engine_gives_them_are_read_and_written(kernels):
    batch = check.make_batch(Case("views", 4, 2, 32, 64, ((6, 90),)))
    fused = torch.randn(90, 4 * 32 + 2 * 32 + 2 * 32)  # Q, K and V of a token in one row
    query = fused[-6:, :128].view(6, 4, 32)
    key, value = fused[:, 128:192].view(90, 2, 32), fused[:, 192:].view(90, 2, 32)
    tables = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    outs = []
    for q, k, v in ((query, key, value), (query.clone(), key.clone(), value.clone())):
        cache = batch.kv_cache.clone()
        kernels.write_kv(k, v, cache, batch.slots)
        wide = torch.zeros(6, 200)
        out = wide[:, 10:138].unflatten(1, (4, 32))
        kernels.prefix(q, cache, *tables, 0.2, out)
        assert (wide[:, :10] == 0).all()
        assert (wide[:, 138:] == 0).all()
        outs.append(out.clone())
    assert torch.equal(*outs)
    assert outs[0].abs().max() > 0


def test_negative_slots_are_skipped(kernels):
    cache = torch.full((2, 1, 32, 24), -1, dtype=torch.int8)
    x = torch.randn(3, 1, 8)
    kernels.write_kv(x, x, cache, torch.tensor([-1, 40, -1]))
    wanted = torch.full_like(cache, -1).numpy()
    reference.write_kv(x.numpy(), x.numpy(), wanted, np.array([-1, 40, -1]))
    assert (cache.numpy() == wanted).all()


def test_nan_in_a_token_that_is_seen_reaches_the_output(kernels):
    batch = check.make_batch(Case("nan", 2, 1, 16, 32, ((1, 40),)))
    arguments = (batch.kv_cache, batch.block_table, batch.seq_lens, 0.25)
    for tensors in (batch.keys, batch.values):
        kept = tensors[0][10, 0, 2].item()
        tensors[0][10, 0, 2] = float("nan")
        kernels.write_kv(batch.keys[0], batch.values[0], batch.kv_cache, batch.slots)
        out = torch.zeros_like(batch.query)
        kernels.decode(batch.query, *arguments, out)
        assert out.isnan().any()
        tensors[0][10, 0, 2] = kept


def test_a_result_does_not_depend_on_the_number_of_threads(kernels):
    batch = check.make_batch(Case("threads", 6, 2, 64, 128, ((1, 1000), (70, 500))))
    tables = (batch.block_table, batch.query_start_loc, batch.seq_lens)
    kernels.write_kv(torch.cat(batch.keys), torch.cat(batch.values), batch.kv_cache, batch.slots)
    outs, threads = [], torch.get_num_threads()
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        try:
            assert kernels.max_threads == n  # one pool: torch's setting is the kernels' setting
            outs.append(torch.empty_like(batch.query))
            kernels.prefix(batch.query, batch.kv_cache, *tables, 0.125, outs[-1])
        finally:
            torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_the_workspace_is_kept_and_does_not_grow_from_layer_to_layer(kernels):
    batch = check.make_batch(Case("workspace", 6, 2, 64, 128, ((1, 600),)))
    kernels.write_kv(batch.keys[0], batch.values[0], batch.kv_cache, batch.slots)
    out, sizes = torch.empty_like(batch.query), []
    for _ in range(20):
        arguments = (batch.kv_cache, batch.block_table, batch.seq_lens, 0.125)
        kernels.decode(batch.query, *arguments, out)
        sizes.append(kernels.workspace_bytes)
    assert sizes[0] > 0
    assert sizes[10] == sizes[-1]


@settings(max_examples=25, deadline=None)
@given(
    shared=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 32).map(lambda n: 8 * n),
    block_size=st.sampled_from([32, 64, 96, 128]),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_mixed_batch_agrees_with_the_scheme(
    shared, kv_heads, head_dim, block_size, requests, seed
):
    lengths = tuple((q, q + history) for q, history in requests)
    case = Case("any", shared * kv_heads, kv_heads, head_dim, block_size, lengths)
    assert_passes(native.load(), case, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(3, 3, 8), (6, 2, 40), (9, 3, 64), (5, 1, 72), (4, 2, 256)]
)
def test_a_first_chunk_is_exact_attention_of_its_own_keys(kernels, heads, kv_heads, dim, dtype):
    lengths = [1, 31, 33, 128, 130, 300]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    g = torch.Generator().manual_seed(0)
    fused = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, generator=g).to(dtype)
    query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
    out = torch.full_like(query, float("nan"))
    kernels.first_chunk(query, key, value, starts, dim**-0.5, out)
    for begin, end in itertools.pairwise(starts.tolist()):
        arrays = (x[begin:end].float().numpy() for x in (query, key, value))
        exact = reference.attention(*arrays, dim**-0.5)
        error = np.abs(out[begin:end].float().numpy() - exact)
        assert error.max() < (5e-5 if dtype == torch.float32 else 0.02)


def test_a_block_or_slot_beyond_the_cache_is_refused(kernels):
    batch = check.make_batch(Case("beyond", 2, 1, 16, 32, ((1, 40),)))
    x = torch.randn(1, 1, 16)
    with pytest.raises(ValueError, match="slot 9999 is beyond"):
        kernels.write_kv(x, x, batch.kv_cache, torch.tensor([9999]))
    batch.block_table[0, 1] = 1000
    with pytest.raises(ValueError, match="beyond the cache's"):
        kernels.decode(
            batch.query, batch.kv_cache, batch.block_table, batch.seq_lens, 1.0, batch.query
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a | {"query": a["query"].double()}, "query is torch.float64"),
        (lambda a: a | {"query": a["query"][..., :8]}, "do not fit"),
        (lambda a: a | {"kv_cache": a["kv_cache"].float()}, "kv_cache is torch.float32"),
        (lambda a: a | {"kv_cache": a["kv_cache"][:, :, :24]}, "give a multiple of 8"),
        (lambda a: a | {"block_table": a["block_table"].long()}, "block_table is torch.int64"),
        (lambda a: a | {"seq_lens": a["seq_lens"].long()}, "seq_lens is torch.int64"),
        (lambda a: a | {"group": 48}, "group is 48"),
    ],
)
def test_an_unusable_tensor_is_named(change, message):
    batch = check.make_batch(Case("wrong", 2, 1, 16, 32, ((1, 40),)))
    arguments = {
        "query": batch.query,
        "kv_cache": batch.kv_cache,
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "sm_scale": 1.0,
        "out": torch.empty_like(batch.query),
    }
    with pytest.raises(ValueError, match=message):
        native.load().decode(**change(arguments))


def test_threads_are_those_of_torch_although_another_runtime_was_mapped_first():
    code = """
import sentencepiece, torch
from kernels_patch import library, native
for n in (3, 1):
    torch.set_num_threads(n)
    assert native.load().max_threads == n, library.find_openmp()
assert "/torch" in library.find_openmp()
assert sum("libgomp" in line and "r-x" in line for line in open("/proc/self/maps")) == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_instruction_set_is_refused_with_those_there_are():
    with pytest.raises(native.NativeUnavailable, match=r"'mmx'.*portable"):
        native.load("mmx")


def test_the_environment_chooses_the_instruction_set():
    code = "from kernels_patch import native; print(native.load().isa)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={native.ISA_VARIABLE: "portable"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "portable"


def test_a_missing_library_says_how_to_build_it(tmp_path):
    with pytest.raises(native.NativeUnavailable, match=r"python -m kernels_patch\.build"):
        library.open_library(tmp_path / "none.so")


def copy_sources(target: Path) -> Path:
    for name in (*build.SOURCES, "build.py"):
        (target / name).write_bytes((build.PACKAGE / name).read_bytes())
    return target


def test_a_library_of_other_sources_is_refused_as_stale(tmp_path):
    package = copy_sources(tmp_path)
    with (package / "tiles.cpp").open("a") as source:
        source.write("// changed\n")
    with pytest.raises(native.NativeUnavailable, match="built from other sources"):
        library.open_library(build.PACKAGE / build.LIBRARY, package)


def test_a_build_without_a_compiler_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.compile_library(tmp_path / "none.so")
    command = [sys.executable, "-m", "kernels_patch.build"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "kernels_patch was not built: no C++ compiler (no-such-compiler) on PATH: install one, or "
        "set CXX\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_leaves_no_library_and_says_why(tmp_path):
    package = copy_sources(tmp_path)
    (package / "native.cpp").write_text("#error broken on purpose\n")
    with pytest.raises(build.BuildError, match="broken on purpose"):
        build.compile_library(tmp_path / "none.so", package)
    assert not list(tmp_path.glob("*.so"))
