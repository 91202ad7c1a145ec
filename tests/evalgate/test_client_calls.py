"""What the client asks of a server besides answers: models, tokens, counters, worker calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stub_server import StubServer

from evalgate.client import Client, NotSupportedError
from evalgate.errors import ServerAnswerError


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def make_client(stub: StubServer) -> Client:
    return Client(stub.base_url, stub.model)


def test_texts_and_messages_are_counted_by_the_server(stub: StubServer) -> None:
    with make_client(stub) as client:
        assert client.tokenize("ab") == [97, 98]
        assert client.detokenize([97, 98]) == "ab"
        assert client.tokenize_chat([{"role": "user", "content": "x"}]) == list(b"<user>x")
    bodies = [body for path, body, _ in stub.requests if path == "/tokenize"]
    assert bodies[0]["add_special_tokens"] is False
    assert (bodies[1]["add_generation_prompt"], bodies[1]["add_special_tokens"]) == (True, False)


def test_the_model_card_is_that_of_our_model(stub: StubServer) -> None:
    with make_client(stub) as client:
        card = client.read_model()
        assert (card.id, card.max_model_len, card.ids) == ("stub", 4096, ["stub"])
        assert client.read_version() == "0.0.0+stub"
    other = Client(stub.base_url + "/v1/", "other")
    with other, pytest.raises(ServerAnswerError, match="serves stub, not 'other'"):
        other.read_model()


METRICS = """\
# HELP vllm:prefix_cache_queries_total Tokens looked up.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 3000.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1096.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 3072.0
# TYPE vllm:prefix_cache_hits_created gauge
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.78e+09
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 5.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{cache_dtype="int8",block_size="16",engine="0"} 1.0
"""


def test_prefix_cache_counters_are_summed_over_engines(stub: StubServer) -> None:
    stub.metrics = METRICS
    with make_client(stub) as client:
        cache = client.read_prefix_cache()
        assert cache is not None
        assert (cache.queries, cache.hits) == (4096, 3072)
        assert client.read_cache_config() == {
            "cache_dtype": "int8",
            "block_size": "16",
            "engine": "0",
        }


def test_a_server_without_metrics_has_none_and_not_zero(stub: StubServer) -> None:
    with make_client(stub) as client:
        assert client.read_metrics() is None
        assert client.read_prefix_cache() is None
        assert client.read_cache_config() is None


@pytest.mark.parametrize("value", ["NaN", "1e400", "-9"])
def test_a_counter_that_counts_nothing_is_an_error(stub: StubServer, value: str) -> None:
    stub.metrics = f"vllm:prefix_cache_queries_total 5\nvllm:prefix_cache_hits_total {value}\n"
    with (
        make_client(stub) as client,
        pytest.raises(ServerAnswerError, match=r"hits_total is .*not"),
    ):
        client.read_prefix_cache()


def test_names_of_a_far_end_are_short(stub: StubServer) -> None:
    stub.version = "v" * 10_000
    stub.metrics = f'vllm:cache_config_info{{cache_dtype="{"d" * 10_000}"}} 1.0\n'
    with make_client(stub) as client:
        assert client.read_version() == "v" * 100
        assert client.read_cache_config() == {"cache_dtype": "d" * 100}
    stub.model = "m" * 10_000
    with Client(stub.base_url, "another") as client, pytest.raises(ServerAnswerError) as caught:
        client.read_model()
    assert len(str(caught.value)) < 1000


def test_broken_metrics_are_an_error(stub: StubServer) -> None:
    stub.metrics = "a{b= 1"
    with make_client(stub) as client, pytest.raises(ServerAnswerError, match="not Prometheus"):
        client.read_metrics()


def test_a_worker_call_gives_one_result_a_worker_or_says_that_it_is_not_supported(
    stub: StubServer,
) -> None:
    stub.rpc["report"] = [{"routes": {"decode": 30}}]
    with make_client(stub) as client:
        assert client.call_rpc("report") == [{"routes": {"decode": 30}}]
        with pytest.raises(NotSupportedError, match="HTTP 404"):
            client.call_rpc("unknown")
