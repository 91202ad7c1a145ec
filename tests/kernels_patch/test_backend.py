"""The backend under vLLM's own classes, without a server: spec, plan, write, attend, report."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels_patch import reference, switches

LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


@pytest.fixture(scope="module")
def backend():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn about its own dependencies
        from kernels_patch import backend

        return backend


@pytest.fixture
def engine(backend, monkeypatch):
    """A configuration of two layers in float32, served by the torch form, with fresh counters."""
    from kernels_patch.counters import RouteCounters
    from kernels_patch.dispatch import choose_kernels

    monkeypatch.setenv("KERNELS_PATCH_IMPL", "torch")
    choose_kernels.cache_clear()
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(block_size=128),
        speculative_config=None,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    monkeypatch.setattr(backend, "COUNTERS", RouteCounters())
    monkeypatch.setattr("kernels_patch.attention.get_current_vllm_config", lambda: config)
    yield config
    choose_kernels.cache_clear()


@pytest.fixture
def stopped(monkeypatch) -> list[str]:
    """The reasons for which the process would have been ended."""
    reasons = []

    def leave(reason):
        reasons.append(reason)
        raise SystemExit

    monkeypatch.setattr(switches, "stop_server", leave)
    return reasons


def make_spec(head_dim: int = 64, dtype: torch.dtype = torch.float32):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=128, num_kv_heads=3, head_size=head_dim, dtype=dtype)


def make_step(starts, seq_lens, table, slots=None, causal=True):
    return SimpleNamespace(
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=slots,
        causal=causal,
    )


def overridden_backends(registry) -> dict[str, str]:
    members = (*registry.AttentionBackendEnum, *registry.MambaAttentionBackendEnum)
    return {member.name: member.get_path() for member in members if member.is_overridden()}


def test_vllm_s_own_loading_of_plug_ins_changes_the_registry_only_when_asked(backend, monkeypatch):
    import vllm.plugins
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(registry, "_MAMBA_ATTN_OVERRIDES", {})
    monkeypatch.delenv("KERNELS_PATCH", raising=False)
    for asked in (False, True):
        monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
        if asked:
            monkeypatch.setenv("KERNELS_PATCH", "int8_kv")
        vllm.plugins.load_general_plugins()
        overridden = overridden_backends(registry)
        assert bool(overridden) is asked
    ours = overridden.pop("CPU_ATTN")
    assert ours == "kernels_patch.adapters.cpu_0_32.Backend"
    assert registry.AttentionBackendEnum.CPU_ATTN.get_class() is backend.Int8KVBackend
    assert {"CPU_MLA", "AMX_MLA", "MAMBA2", "GDN_ATTN"} <= set(overridden)
    assert set(overridden.values()) == {"kernels_patch.refusing.RefusingBackend"}


def test_the_planner_is_told_every_byte_of_a_token(backend):
    spec = make_spec()
    ours = backend.Int8KVBackend.customize_spec(spec)
    assert ours.dtype == torch.int8
    assert ours.page_size_bytes == 3 * 128 * (2 * 64 + 8)
    assert spec.page_size_bytes / ours.page_size_bytes == pytest.approx(512 / 136)
    source = backend.Int8KVBackend.customize_spec(make_spec(256, torch.bfloat16))
    assert source.page_size_bytes / 3 / 128 * 4 == 2080  # the source's 4 KV heads of 256


def test_the_backend_answers_to_the_cpu_s_name_and_layout(backend):
    ours = backend.Int8KVBackend
    assert ours.get_name() == "CPU_ATTN"
    assert [layout.name for layout in ours.supported_kv_cache_layouts()] == ["LBHNC"]
    assert ours.supports_block_size(128)
    assert not ours.supports_block_size(48)
    assert ours.forward_includes_kv_cache_update


@pytest.mark.parametrize(("impl", "decode"), [("torch", "decode_torch"), ("native", "decode")])
def test_two_steps_are_written_attended_counted_and_reported(
    backend, engine, monkeypatch, impl, decode
):
    monkeypatch.setenv("KERNELS_PATCH_IMPL", impl)
    builder = backend.Int8KVMetadataBuilder(make_spec(16), LAYERS, engine, torch.device("cpu"))
    layers = [backend.Int8KVImpl(6, 16, 0.25, 3) for _ in LAYERS]
    cache = torch.zeros((4, 3, 128, 40), dtype=torch.int8)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    torch.manual_seed(0)
    query, key, value = torch.randn(140, 6, 16), *torch.randn(2, 140, 3, 16)
    position = torch.arange(140)
    slots = table[0, position // 128].long() * 128 + position % 128
    chunk = make_step([0, 139, 139], [139, 0], table, slots[:139])
    token = make_step([0, 1], [140], table[:1], slots[139:])
    for step, rows in ((chunk, slice(0, 139)), (token, slice(139, 140))):
        metadata = builder.build(0, step)
        for name, attention in zip(LAYERS, layers, strict=True):
            layer = SimpleNamespace(layer_name=name)
            out = torch.full_like(query[rows], torch.nan)
            attention.forward(layer, query[rows], key[rows], value[rows], cache, metadata, out)
            exact = reference.attention(
                query[rows].numpy(), key[: rows.stop].numpy(), value[: rows.stop].numpy(), 0.25
            )
            np.testing.assert_allclose(out.numpy(), exact, atol=0.05)

    from kernels_patch.worker import make_report

    report = make_report(dict(zip(LAYERS, layers, strict=True)), dict.fromkeys(LAYERS, cache))
    assert report["active"] is True
    assert report["impl"] == impl
    assert report["fault"] is None
    assert report["steps"] == 2
    assert {k: v for k, v in report["routes"].items() if v} == {
        "first_chunk": 2,
        decode: 2,
    }
    assert report["layers_mismatch"] == []
    assert report["kv_cache"] == {
        "layers": 2,
        "dtype": "int8",
        "num_blocks": 4,
        "num_kv_heads": 3,
        "block_size": 128,
        "head_dim": 16,
        "bytes_per_token_per_layer": 120,
    }


def test_a_step_is_counted_once_however_many_groups_the_cache_has(backend, engine):
    """vLLM plans a step for each group: layers of other head counts, or too many for one group."""
    groups = [LAYERS[:1], LAYERS[1:]]
    builders = [
        backend.Int8KVMetadataBuilder(make_spec(16), names, engine, torch.device("cpu"))
        for names in groups
    ]
    impl = backend.Int8KVImpl(6, 16, 0.25, 3)
    cache = torch.zeros((2, 3, 128, 40), dtype=torch.int8)
    table = torch.zeros((1, 1), dtype=torch.int32)
    query, key, value = torch.randn(4, 6, 16), *torch.randn(2, 4, 3, 16)
    for first, last in ((0, 3), (3, 4)):
        rows = slice(first, last)
        step = make_step([0, last - first], [last], table, torch.arange(first, last))
        for builder, names in zip(builders, groups, strict=True):
            metadata = builder.build(0, step)
            layer = SimpleNamespace(layer_name=names[0])
            out = torch.empty_like(query[rows])
            impl.forward(layer, query[rows], key[rows], value[rows], cache, metadata, out)
    report = backend.COUNTERS.as_dict()
    assert report["steps"] == 2
    assert report["tokens"]["first_chunk"] == 3
    assert report["route_steps"]["decode_torch"] == 1
    assert report["layers_mismatch"] == []


@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn about its own dependencies
def test_attention_that_vllm_derives_from_the_backend_stops_the_server(backend, engine, stopped):
    """Llama 4's local chunks, say: the builder would be told of other batches than there are."""
    from vllm.model_executor.layers.attention.chunked_local_attention import (
        create_chunked_local_attention_backend,
    )

    derived = create_chunked_local_attention_backend(backend.Int8KVBackend, 8192)
    with pytest.raises(SystemExit):
        derived.get_builder_cls()(make_spec(16), LAYERS, engine, torch.device("cpu"))
    assert "(ChunkedLocalAttentionBuilder) and that was never tried" in stopped[0]


def test_a_profiling_run_attends_nothing_and_counts_nothing(backend, engine):
    backend.Int8KVMetadataBuilder(make_spec(16), LAYERS, engine, torch.device("cpu"))
    out = torch.full((5, 6, 16), 7.0)
    layer = SimpleNamespace(layer_name=LAYERS[0])
    impl = backend.Int8KVImpl(6, 16, 0.25, 3)
    impl.forward(layer, out, None, None, torch.tensor([]), None, out)
    assert (out == 7).all()
    assert backend.COUNTERS.steps == 0
    assert not backend.COUNTERS.launches.any()


def test_a_mask_that_is_not_causal_is_refused(backend, engine):
    builder = backend.Int8KVMetadataBuilder(make_spec(16), LAYERS, engine, torch.device("cpu"))
    step = make_step([0, 2], [2], torch.zeros(1, 1, dtype=torch.int32), causal=False)
    with pytest.raises(NotImplementedError, match="causal attention only"):
        builder.build(0, step)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 256},
        {"alibi_slopes": [1.0] * 6},
        {"logits_soft_cap": 30.0},
        {"head_size": 20},
        {"attn_type": "encoder_only"},
        {"sinks": torch.zeros(6)},
    ],
)
def test_a_layer_that_cannot_be_served_stops_the_server(backend, engine, stopped, options):
    arguments = {"num_heads": 6, "head_size": 16, "scale": 0.25, "num_kv_heads": 3} | options
    with pytest.raises(SystemExit):
        backend.Int8KVImpl(**arguments)
    assert len(stopped) == 1


@pytest.mark.parametrize(
    ("part", "option", "value", "reason"),
    [
        ("cache_config", "block_size", 16, "--block-size is 16: give a multiple of 32"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism is 2"),
        ("parallel_config", "prefill_context_parallel_size", 4, "context parallelism is 4"),
        (None, "kv_transfer_config", object(), "a KV connector or offloading is configured"),
        (None, "speculative_config", object(), "speculative decoding is on"),
    ],
)
def test_an_engine_that_cannot_be_served_stops_the_server(
    backend, engine, stopped, part, option, value, reason
):
    setattr(engine if part is None else getattr(engine, part), option, value)
    with pytest.raises(SystemExit):
        backend.Int8KVImpl(6, 16, 0.25, 3)
    assert [one.startswith(reason) for one in stopped] == [True]


def test_a_stock_worker_reports_that_nothing_is_patched():
    from kernels_patch.worker import make_report

    stock = SimpleNamespace(head_size=64)
    report = make_report({"layer": stock}, {"layer": torch.zeros(2, 3, 128, 128)})
    assert report["active"] is False
    assert report["impl"] is None
    assert report["layers"] == 0
    assert report["kv_cache"]["dtype"] == "float32"
    assert report["kv_cache"]["bytes_per_token_per_layer"] == 3 * 128 * 4
    assert make_report({"layer": stock}, {"layer": torch.tensor([])})["kv_cache"] is None


def test_a_worker_says_which_one_of_how_many_it_is():
    """A reader that lacks a worker's report must see that it does."""
    from kernels_patch.worker import WorkerExtension

    context = SimpleNamespace(static_forward_context={})
    worker = SimpleNamespace(
        rank=1,
        parallel_config=SimpleNamespace(world_size=2),
        vllm_config=SimpleNamespace(compilation_config=context),
    )
    report = WorkerExtension.kernels_patch_report(worker)
    assert (report["rank"], report["world_size"]) == (1, 2)
    assert report["model_layers"] == 0
