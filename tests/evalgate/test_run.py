"""The order of a run, against scripted servers on real sockets, attached to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stub_server import Answer, StubServer, plain_answer, usage_chunk

from evalgate.commands import judge_again
from evalgate.errors import InterruptedRunError, ServerAnswerError, StorageError, UsageError
from evalgate.measure import judge_measured
from evalgate.run import UntilDecided, execute, resume
from evalgate.spec import Spec, parse_spec
from evalgate.stopping import TimeLimit
from evalgate.store import load_run
from evalgate.verdicts import choose_policy, list_open_rules


class Watcher:
    """Progress that notes what it is told, and may interrupt."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.said: list[str] = []
        self.steps = 0
        self.total = 0.0
        self.done = 0.0
        self._interrupt_after = interrupt_after

    def begin(self, total_work: float) -> None:
        self.total = total_work

    def extend(self, work: float) -> None:
        self.total += work

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, work: float, text: str) -> None:
        self.done += work
        self.steps += 1
        if self.steps == self._interrupt_after:
            raise KeyboardInterrupt


def make_spec(stub: StubServer, *, extra: str = "", **schedule: int | str) -> Spec:
    settings = {"warmup": 1, "seed": 5, **schedule}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    return parse_spec(
        f"""
name = "attached"
[model]
name = "{stub.model}"
[arms.baseline]
base_url = "{stub.base_url}"
[arms.candidate]
base_url = "{stub.base_url}"
[schedule]
{lines}
[load]
output_tokens = 4
[[load.buckets]]
name = "small"
min_tokens = 1200
max_tokens = 1600
prompts = 2
[[load.buckets]]
name = "large"
min_tokens = 1600
max_tokens = 2400
prompts = 2
{extra}
""",
        "spec",
    )


def reply(body: dict) -> Answer:
    """Two tokens and a stop, with the prompt's true length (a token is a byte).

    On a busy machine a faster pace arrives as one, and chunks in no time are invalid.
    """
    prompt = body.get("prompt")
    if prompt is None:
        prompt = "".join(m["content"] for m in body["messages"]).encode()
    return plain_answer(["A", "B"], prompt_tokens=len(prompt), ttft_s=0.002, tpot_s=0.01)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def stub():
    with StubServer(max_model_len=8192, reply=reply) as server:
        yield server


def generations(stub: StubServer) -> list[dict]:
    return [body for path, body, _ in stub.requests if path.endswith("completions")]


def test_a_run_stores_every_pair_of_every_block(stub, tmp_path):
    watcher = Watcher()
    execute(make_spec(stub, blocks=2, repetitions=2), tmp_path / "r", watcher)
    stored = load_run(tmp_path / "r")
    assert stored.run.status == "complete"
    keys = {
        arm: {r.key for r in stored.requests if r.arm == arm and r.phase == "measure"}
        for arm in ("baseline", "candidate")
    }
    assert keys["baseline"] == keys["candidate"]
    assert len(keys["baseline"]) == 2 * 4 * 2
    assert watcher.done == pytest.approx(watcher.total)


def test_arms_alternate_in_abba_order(stub, tmp_path):
    execute(make_spec(stub), tmp_path / "r", Watcher())
    stored = load_run(tmp_path / "r")
    order = [r.arm[0] for r in stored.requests if r.phase == "measure"]
    assert "".join(order) == "bccbbccb"


def test_no_two_requests_share_a_salt(stub, tmp_path):
    execute(make_spec(stub, blocks=2), tmp_path / "r", Watcher())
    salts = [body["cache_salt"] for body in generations(stub)]
    assert len(set(salts)) == len(salts) > 16


def test_warm_up_is_kept_apart(stub, tmp_path):
    execute(make_spec(stub, warmup=3), tmp_path / "r", Watcher())
    phases = [r.phase for r in load_run(tmp_path / "r").requests]
    assert phases.count("warmup") == 3 * 2
    assert phases[:6] == ["warmup"] * 6


def test_without_warm_up_nothing_is_generated_before_the_measured_requests(stub, tmp_path):
    execute(make_spec(stub, warmup=0), tmp_path / "r", Watcher())
    stored = load_run(tmp_path / "r")
    assert len(generations(stub)) == len(stored.requests) == 8
    assert {r.phase for r in stored.requests} == {"measure"}


def test_a_server_without_tokenize_is_sized_by_its_usage(tmp_path):
    with StubServer(max_model_len=8192, reply=reply, vllm=False) as stub:
        execute(make_spec(stub), tmp_path / "r", Watcher())
        stored = load_run(tmp_path / "r")
        texts = [b["messages"][0]["content"] for b in generations(stub) if "messages" in b]
    measured = [r for r in stored.requests if r.phase == "measure"]
    assert all(1150 <= r.prompt_tokens < 2500 for r in measured)
    fronts = [text[:15] for text in texts if "report by a public agency" in text]
    assert len(set(fronts[-10:])) == 10  # a nonce of its own stands in front of each prompt


def test_task_samples_are_scored_in_both_arms(stub, tmp_path):
    spec = make_spec(stub, extra="[tasks.retrieval]\nlimit = 3", blocks=2)
    execute(spec, tmp_path / "r", Watcher())
    samples = load_run(tmp_path / "r").samples
    assert len(samples) == 6  # greedy repeats are no new evidence: the first block alone
    assert {s.score for s in samples} == {0.0}
    assert {s.prediction for s in samples} == {"AB"}


def test_a_failed_request_is_a_record_and_the_run_goes_on(stub, tmp_path):
    seen = []

    def fail_once(body: dict) -> Answer:
        seen.append(body)
        return Answer([b'{"error": {"message": "boom"}}'], 500) if len(seen) == 6 else reply(body)

    stub.reply = fail_once
    execute(make_spec(stub), tmp_path / "r", Watcher())
    stored = load_run(tmp_path / "r")
    failed = [r for r in stored.requests if r.error]
    assert [r.error.category for r in failed] == ["http"]
    assert stored.run.status == "complete"
    answer = judge_measured(stored, tmp_path / "r", None, "json")
    assert answer.exit_code == 4
    assert "1 of 4 pairs failed" in answer.text


def test_a_failed_warm_up_stops_the_run_and_resume_repeats_the_block(stub, tmp_path):
    def fail_long(body: dict) -> Answer:
        if len(body.get("prompt") or "") > 1000:
            return Answer([b'{"error": {"message": "boom"}}'], 500)
        return reply(body)

    stub.reply = fail_long
    with pytest.raises(ServerAnswerError, match="warm-up"):
        execute(make_spec(stub), tmp_path / "r", Watcher())
    broken = load_run(tmp_path / "r")
    assert broken.run.status == "failed"
    stub.reply = reply
    resume(tmp_path / "r", Watcher())
    stored = load_run(tmp_path / "r")
    assert stored.run.status == "complete"
    assert stored.run.extra["excluded_blocks"] == [0]
    assert {r.block for r in stored.requests if r.phase == "measure"} == {1}


@pytest.mark.parametrize("after", [1, 5, 11])
def test_an_interrupted_run_keeps_its_records_and_resumes_to_a_valid_verdict(stub, tmp_path, after):
    with pytest.raises(InterruptedRunError, match="--resume"):
        execute(make_spec(stub, blocks=2), tmp_path / "r", Watcher(interrupt_after=after))
    kept = load_run(tmp_path / "r")
    assert kept.run.extra["failure"] == "interrupted"
    assert len(kept.requests) == after
    resume(tmp_path / "r", Watcher())
    stored = load_run(tmp_path / "r")
    assert stored.requests[:after] == kept.requests
    verdict = json.loads(judge_measured(stored, tmp_path / "r", None, "json").text)
    assert verdict["invalid_reasons"] == []


class Clock:
    """Minutes by the number of times that somebody has looked."""

    def __init__(self, *minutes: float) -> None:
        self._minutes = iter(minutes)

    def __call__(self) -> float:
        return 60 * next(self._minutes)


def test_a_launch_that_would_end_after_the_time_limit_is_not_begun(stub, tmp_path):
    spec, folder = make_spec(stub, blocks=3), tmp_path / "r"
    # It looks when it begins, before the second block, and before the third.
    plenty_then_none = TimeLimit(10, clock=Clock(0, 1, 9.999999))
    with pytest.raises(InterruptedRunError, match=r"2 of 3 launches .* --resume") as caught:
        execute(spec, folder, Watcher(), limit=plenty_then_none)
    kept = load_run(folder)
    assert kept.run.extra["completed_blocks"] == [0, 1]
    assert kept.run.extra["failure"] == str(caught.value)
    assert len(kept.run.extra["block_s"]) == 2
    assert kept.run.extra["excluded_blocks"] == []
    with pytest.raises(InterruptedRunError, match="2 of 3 launches"):  # it knows how long one takes
        resume(folder, Watcher(), limit=TimeLimit(10, clock=Clock(0, 9.999999)))
    resume(folder, Watcher(), limit=TimeLimit(10, clock=Clock(0, 1)))
    done = load_run(folder)
    assert done.run.status == "complete"
    assert done.run.extra["completed_blocks"] == [0, 1, 2]
    assert done.requests[: len(kept.requests)] == kept.requests


def test_the_first_launch_is_made_whatever_the_time_limit(stub, tmp_path):
    execute(make_spec(stub), tmp_path / "r", Watcher(), limit=TimeLimit(1e-9))
    assert load_run(tmp_path / "r").run.status == "complete"


def test_a_resume_with_another_spec_is_refused(stub, tmp_path):
    with pytest.raises(InterruptedRunError):
        execute(make_spec(stub), tmp_path / "r", Watcher(interrupt_after=3))
    with pytest.raises(UsageError, match="another spec"):
        resume(tmp_path / "r", Watcher(), make_spec(stub, seed=6))


def test_a_strangers_run_sends_nothing_to_the_servers_that_it_names(stub, tmp_path, monkeypatch):
    """Nor a key: which variable holds it is the stranger's choice too."""
    with pytest.raises(InterruptedRunError):
        execute(make_spec(stub), tmp_path / "r", Watcher(interrupt_after=3))
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "of another user"))
    stub.requests.clear()
    with pytest.raises(UsageError, match="not started by this user"):
        resume(tmp_path / "r", Watcher())
    assert stub.requests == []


def test_a_server_that_was_upgraded_meanwhile_does_not_answer_for_the_rest(stub, tmp_path):
    with pytest.raises(InterruptedRunError):
        execute(make_spec(stub, blocks=2), tmp_path / "r", Watcher(interrupt_after=11))
    stub.version = "0.0.1"
    asked = len(generations(stub))
    with pytest.raises(ServerAnswerError, match=r"version 0\.0\.1 now and was 0\.0\.0\+stub"):
        resume(tmp_path / "r", Watcher())
    assert len(generations(stub)) == asked


def test_a_server_that_was_started_again_within_a_block_is_found(stub, tmp_path):
    """Its counters begin anew; the answers themselves look well."""
    counts = iter(range(40_000, 0, -1000))

    def answer(body):
        queries = next(counts)
        stub.metrics = (
            f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total 0\n"
        )
        return reply(body)

    stub.reply = answer
    with pytest.raises(ServerAnswerError, match=r"server fell during block 0.*--resume"):
        execute(make_spec(stub), tmp_path / "r", Watcher())


def test_a_complete_run_is_not_resumed(stub, tmp_path):
    execute(make_spec(stub), tmp_path / "r", Watcher())
    with pytest.raises(UsageError, match="complete"):
        resume(tmp_path / "r", Watcher())


def test_prompts_that_exceed_the_context_are_refused_before_load(tmp_path):
    with StubServer(max_model_len=2000, reply=reply) as stub:
        with pytest.raises(UsageError, match=r"context is 2000"):
            execute(make_spec(stub), tmp_path / "r", Watcher())
        assert [b for b in generations(stub) if len(b.get("prompt") or "") > 1000] == []


def test_an_existing_folder_is_not_overwritten(stub, tmp_path):
    execute(make_spec(stub), tmp_path / "r", Watcher())
    before = (tmp_path / "r" / "requests.jsonl").read_bytes()
    with pytest.raises(UsageError, match="already holds"):
        execute(make_spec(stub), tmp_path / "r", Watcher())
    assert (tmp_path / "r" / "requests.jsonl").read_bytes() == before


def test_a_server_that_is_not_there_is_named(stub, tmp_path):
    spec = make_spec(stub)
    stub.__exit__(None, None, None)
    with pytest.raises(Exception, match=stub.base_url.removeprefix("http://")) as caught:
        execute(spec, tmp_path / "r", Watcher())
    assert caught.value.exit_code == 4


def test_a_model_folder_that_is_not_there_is_refused_before_a_launch(tmp_path):
    spec = parse_spec(
        f"""
name = "s"
[model]
name = "m"
path = "{tmp_path}/none"
[arms.baseline]
args = ["--max-num-batched-tokens", "512"]
[[load.buckets]]
name = "b"
min_tokens = 100
max_tokens = 200
prompts = 1
""",
        "s",
    )
    with pytest.raises(UsageError, match="does not exist"):
        execute(spec, tmp_path / "r", Watcher())
    assert not (tmp_path / "r").exists()


def test_calibration_runs_the_baseline_in_both_arms(stub, tmp_path):
    execute(make_spec(stub, blocks=2), tmp_path / "r", Watcher(), calibrate=True)
    run = load_run(tmp_path / "r").run
    assert run.extra["calibration"] is True
    assert run.spec["arms"]["candidate"] == run.spec["arms"]["baseline"]


def test_a_calibration_is_judged_without_required_routes_whenever_it_is_judged(stub, tmp_path):
    policy = """
[policy.validity]
require_routes = ["prefix"]
[[policy.rules]]
name = "e2el"
metric = "e2el"
kind = "non_inferiority"
margin_percent = 90.0
"""
    execute(make_spec(stub, extra=policy, blocks=2), tmp_path / "r", Watcher(), calibrate=True)
    verdict = json.loads(judge_again(str(tmp_path / "r"), None, None, "json").text)
    assert verdict["invalid_reasons"] == []


def test_alternating_servers_are_up_one_at_a_time(stub, tmp_path):
    watcher = Watcher()
    execute(make_spec(stub, mode="alternating", blocks=2), tmp_path / "r", watcher)
    attached = [line.split(" ")[-1] for line in watcher.said if "attaching" in line]
    assert attached == ["baseline", "candidate", "candidate", "baseline"]
    assert load_run(tmp_path / "r").run.status == "complete"


def test_the_machine_rests_before_each_launch_but_the_first(stub, tmp_path):
    watcher = Watcher()
    spec = make_spec(stub, mode="alternating", blocks=2, cooldown_s=0.01)
    execute(spec, tmp_path / "r", watcher)
    steps = [line for line in watcher.said if "cooling" in line or "attaching" in line]
    assert [line.split()[0] for line in steps] == [
        "block", "cooling", "block", "cooling", "block", "cooling", "block"
    ]  # fmt: skip
    resident = Watcher()
    execute(make_spec(stub, blocks=2, cooldown_s=0.01), tmp_path / "s", resident)
    assert sum("cooling" in line for line in resident.said) == 1


def test_a_results_folder_that_cannot_be_made_is_a_clear_error(stub, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((StorageError, UsageError), match="file"):
        execute(make_spec(stub), Path(tmp_path / "file" / "r"), Watcher())


def test_what_others_took_of_the_machine_is_shown(stub, tmp_path):
    execute(make_spec(stub), tmp_path / "r", Watcher())
    stored = load_run(tmp_path / "r")
    assert stored.run.extra["machine"]["other_cpu_cores_mean"] >= 0
    assert "other processes took" in judge_measured(stored, tmp_path / "r", None, "text").text
    assert "processor cores on average" in (tmp_path / "r" / "report.html").read_text()


LENIENT = """
[[policy.rules]]
name = "e2el"
metric = "e2el"
kind = "non_inferiority"
margin_percent = 99.0
"""


def measure_until(spec: Spec, folder: Path, watcher: Watcher, minutes: float, **settings) -> None:
    def open_rules(path: Path) -> list[str]:
        stored = load_run(path)
        return list_open_rules(stored, choose_policy(None, stored.run, "r"), None)

    if settings.pop("again", False):
        resume(folder, watcher, open_rules=open_rules)
    else:
        until = UntilDecided(minutes, settings.pop("first_look", 1), open_rules)
        execute(spec, folder, watcher, until=until)


def test_a_run_until_decided_stops_at_the_first_look_that_decides_every_rule(stub, tmp_path):
    watcher = Watcher()
    measure_until(make_spec(stub, extra=LENIENT, blocks=2), tmp_path / "r", watcher, 10)
    run = load_run(tmp_path / "r").run
    assert run.status == "complete"
    assert watcher.done == pytest.approx(watcher.total)
    found = run.extra["sequential"]
    assert found["ended"] == "decided"
    assert found["looks"][0]["blocks"] == 2
    assert run.extra["completed_blocks"] == list(range(found["looks"][-1]["blocks"]))
    verdict = json.loads(judge_again(str(tmp_path / "r"), None, None, "json").text)
    assert verdict["status"] == "pass"
    assert verdict["rules"][0]["details"]["sequential"]["look"] == len(found["looks"])
    assert any("added launches until" in warning for warning in verdict["warnings"])


def test_a_run_until_decided_ends_with_its_minutes(stub, tmp_path):
    extra = LENIENT.replace("99.0", "0.0").replace("non_inferiority", "superiority")
    watcher = Watcher()
    measure_until(make_spec(stub, extra=extra), tmp_path / "r", watcher, 1e-4, first_look=6)
    found = load_run(tmp_path / "r").run.extra["sequential"]
    assert found["looks"] == [{"blocks": 1, "spent": 1.0}]
    assert judge_again(str(tmp_path / "r"), None, None, "json").exit_code in (0, 1, 3)


def test_an_interrupted_run_until_decided_goes_on_as_it_was_begun(stub, tmp_path):
    spec = make_spec(stub, extra=LENIENT, blocks=2)
    with pytest.raises(InterruptedRunError):
        measure_until(spec, tmp_path / "r", Watcher(interrupt_after=14), 10)
    kept = load_run(tmp_path / "r").run.extra["sequential"]
    assert (kept["looks"], len(kept["block_s"])) == ([], 1)
    with pytest.raises(UsageError, match="drop --max-minutes"):  # it has its own
        resume(tmp_path / "r", Watcher(), limit=TimeLimit(5))
    measure_until(spec, tmp_path / "r", Watcher(), 10, again=True)
    found = load_run(tmp_path / "r").run.extra["sequential"]
    assert found["ended"] == "decided"
    assert found["used_s"] > kept["used_s"]
    assert json.loads(judge_again(str(tmp_path / "r"), None, None, "json").text)["status"] == "pass"


def test_a_run_that_is_invalid_is_not_prolonged(tmp_path):
    def reply_from_cache(body: dict) -> Answer:
        *steps, _, done = reply(body).steps
        return Answer([*steps, usage_chunk(1300, 3, 64), done])

    with StubServer(max_model_len=8192, reply=reply_from_cache) as stub:
        spec = make_spec(stub, extra=LENIENT, blocks=2)
        measure_until(spec, tmp_path / "r", Watcher(), 10)
    assert len(load_run(tmp_path / "r").run.extra["sequential"]["looks"]) == 1
    assert judge_again(str(tmp_path / "r"), None, None, "json").exit_code == 4


def test_added_blocks_are_told_to_the_progress_as_they_begin(stub, tmp_path):
    answers = iter([["e2el"], ["e2el"], []])  # open at two looks, decided at the third
    watcher = Watcher()
    until = UntilDecided(10, 1, lambda folder: next(answers))
    execute(make_spec(stub, blocks=2), tmp_path / "r", watcher, until=until)
    assert load_run(tmp_path / "r").run.extra["completed_blocks"] == [0, 1, 2, 3]
    assert watcher.done == pytest.approx(watcher.total)
    assert [line.split(":")[0][:6] for line in watcher.said if "look" in line] == [
        "look 1", "look 2", "look 3"
    ]  # fmt: skip
