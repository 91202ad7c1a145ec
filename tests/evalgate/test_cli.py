"""The command line: each command's answer, its exit code, and one sentence for each bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from factories import make_arm, make_request, make_run, make_spec

from evalgate import cli
from evalgate.records import StoredRun
from evalgate.store import RunWriter

RULES = """
[[rules]]
name = "tpot"
metric = "tpot"
kind = "non_inferiority"
margin_percent = 5.0
"""


def run_cli(*arguments: str) -> int:
    return cli._run(list(arguments))


def save(folder: Path, stored: StoredRun) -> Path:
    writer = RunWriter.create(folder, stored.run)
    for record in stored.requests:
        writer.append_request(record)
    for sample in stored.samples:
        writer.append_sample(sample)
    writer.close()
    return folder


def make_stored(tpot_factor: float = 1.0, *, blocks: int = 3, arms=("baseline", "candidate")):
    """A load of a few blocks; the candidate's TPOT is ``tpot_factor`` times the baseline's."""
    requests = []
    for block in range(blocks):
        for arm in arms:
            factor = tpot_factor if arm == "candidate" else 1.0
            wobble = 1 + 0.001 * ((block * 7 + (arm == "candidate") * 3) % 5 - 2)
            requests += make_load_arm(arm, block, 0.02 * factor * wobble)
    spec = make_spec(arms={arm: {"args": [], "env": {}} for arm in arms}, blocks=blocks)
    run = make_run(arms={arm: make_arm(blocks=blocks) for arm in arms}, spec=spec)
    return StoredRun("r", run, requests)


def make_load_arm(arm: str, block: int, tpot_s: float):
    return [
        make_request(arm, block=block, prompt_id=f"p{i}", bucket=bucket, prompt_tokens=tokens,
                     tpot_s=tpot_s)
        for bucket, tokens in (("4K-8K", 5000), ("8K-16K", 10000), ("16K-32K", 20000))
        for i in range(2)
    ]  # fmt: skip


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(RULES)
    return str(path)


@pytest.mark.parametrize(
    ("factor", "code", "status"), [(0.99, 0, "pass"), (1.5, 1, "fail"), (1.05, 3, "inconclusive")]
)
def test_gate_exits_with_the_verdicts_code(tmp_path, policy, capsys, factor, code, status):
    folder = save(tmp_path / "r", make_stored(factor))
    assert run_cli("gate", str(folder), "--policy", policy, "--format", "json") == code
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["status"], verdict["exit_code"]) == (status, code)


def test_gate_explains_itself(tmp_path, policy, capsys):
    folder = save(tmp_path / "r", make_stored(1.5))
    assert run_cli("gate", str(folder), "--policy", policy, "--explain") == 1
    assert "tpot" in capsys.readouterr().out


def test_a_damaged_run_exits_4_and_names_the_line(tmp_path, policy, capsys):
    folder = save(tmp_path / "r", make_stored())
    with (folder / "requests.jsonl").open("a") as file:
        file.write('{"arm": "baseline"}\n')
    assert run_cli("gate", str(folder), "--policy", policy) == 4
    assert "requests.jsonl line 37" in capsys.readouterr().err


def test_a_foreign_schema_version_exits_4(tmp_path, policy, capsys):
    folder = save(tmp_path / "r", make_stored())
    text = (folder / "run.json").read_text().replace('"schema_version": 1', '"schema_version": 9')
    (folder / "run.json").write_text(text)
    assert run_cli("gate", str(folder), "--policy", policy) == 4
    assert "schema_version is 9" in capsys.readouterr().err


def test_compare_takes_two_runs_of_one_arm(tmp_path, policy, capsys):
    base = save(tmp_path / "a", make_stored(arms=("baseline",)))
    stored = make_stored(1.5, arms=("candidate",))
    other = StoredRun(
        "b", stored.run.model_copy(update={"run_id": "r2"}), stored.requests, stored.samples
    )
    cand = save(tmp_path / "b", other)
    code = run_cli("compare", str(base), str(cand), "--policy", policy, "--format", "json")
    assert code == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["rules"][0]["observed"] == pytest.approx(50, abs=1)


def test_compare_takes_arms_of_one_run_and_names_a_missing_one(tmp_path, policy, capsys):
    folder = save(tmp_path / "r", make_stored())
    pair = (f"{folder}:baseline", f"{folder}:candidate")
    assert run_cli("compare", *pair, "--policy", policy) in (0, 3)
    assert run_cli("compare", f"{folder}:baseline", f"{folder}:canditate", "--policy", policy) == 2
    assert "'canditate'" in capsys.readouterr().err
    assert run_cli("compare", str(folder), str(folder), "--policy", policy) == 2


def test_compare_sets_a_gain_beside_what_attention_could_give(tmp_path, capsys):
    folder = save(tmp_path / "r", make_stored(0.5))
    profile = tmp_path / "kernels.csv"
    profile.write_text(
        '"Name","Calls","TotalDurationNs"\n'
        '"paged_attention_kernel",100,4000000\n"gemm",100,96000000\n'
    )
    pair = (f"{folder}:baseline", f"{folder}:candidate")
    run_cli("compare", *pair, "--policy", "nightly", "--profile", str(profile), "--format", "json")
    warnings = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    assert "attention is 4.000 % of kernel time, so at most +4.17 % end to end" in warnings
    assert "more than attention can give" in warnings


def test_report_writes_a_page_and_exits_0_whatever_the_verdict(tmp_path, policy):
    folder = save(tmp_path / "r", make_stored(1.5))
    page = tmp_path / "page.html"
    assert run_cli("report", str(folder), "--policy", policy, "--out", str(page)) == 0
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gate", "no/such/run"], "no/such/run"),
        (["gate", "x", "--format", "pdf"], "pdf"),
        (["frobnicate"], "frobnicate"),
        (["run", "no-such-spec.toml"], "no-such-spec.toml"),
        (["score", "hotpot", "x.jsonl"], "hotpotqa"),
        (["tasks", "show", "retreival"], "retrieval"),
        (["trend", "no/such/folder"], "no/such/folder"),
        (["run", "--resume", "no/such/run"], "no/such/run"),
        (["run", "--resume", "x", "--out", "y"], "--resume"),
        (["gate", "x", "--explain", "--format", "json"], "--explain"),
        (["run", "x", "--until-decided"], "--max-minutes"),
        (["run", "x", "--max-minutes", "0"], "--max-minutes"),
        (["run", "x", "--until-decided", "--max-minutes", "0"], "--max-minutes"),
        (["run", "x", "--until-decided", "--max-minutes", "5", "--calibrate"], "--calibrate"),
        (["run", "--resume", "x", "--until-decided", "--max-minutes", "5"], "--until-decided"),
    ],
)
def test_usage_errors_exit_2_and_name_the_value(arguments, sentence, capsys):
    assert run_cli(*arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_wrong_policy_exits_2_with_the_nearest_key(tmp_path, capsys):
    folder = save(tmp_path / "r", make_stored())
    bad = tmp_path / "bad.toml"
    bad.write_text(RULES.replace("margin_percent", "margin_percnt"))
    assert run_cli("gate", str(folder), "--policy", str(bad)) == 2
    assert "'margin_percent'" in capsys.readouterr().err


def test_an_unforeseen_error_exits_5_and_asks_for_a_report(monkeypatch, capsys):
    monkeypatch.setattr("evalgate.commands.judge_again", lambda *a, **k: 1 / 0)
    assert run_cli("gate", "x") == 5
    assert "internal error" in capsys.readouterr().err


def test_an_interrupt_exits_130(monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("evalgate.commands.judge_again", stop)
    assert run_cli("gate", "x") == 130


def test_an_answer_that_nobody_reads_is_neither_pass_nor_fail(tmp_path):
    """As in `evalgate gate RUN | head -1` under pipefail."""
    folder = save(tmp_path / "r", make_stored())
    command = [sys.executable, "-m", "evalgate.cli", "gate", str(folder), "--format", "html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_answer_is_a_sentence(tmp_path):
    folder = save(tmp_path / "r", make_stored())
    command = [sys.executable, "-m", "evalgate.cli", "report", str(folder)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert "the answer is cut, No space left" in done.stderr
    assert "Traceback" not in done.stderr


def test_selftest_plants_faults_and_exits_0_when_all_are_caught(capsys):
    assert run_cli("selftest", "--format", "json") == 0
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert len(faults) > 30
    assert all(fault["caught"] for fault in faults)


def test_score_prints_the_fixed_json(tmp_path, capsys):
    lines = tmp_path / "p.jsonl"
    lines.write_text(
        '{"id": "1", "prediction": "Bono", "references": ["Bob Dylan"]}\n'
        '{"id": "2", "prediction": "Paris", "references": ["City of Light", "Paris"]}\n'
    )
    assert run_cli("score", "hotpotqa", str(lines)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["task", "task_version", "scoring", "n", "mean", "items"]
    assert answer["mean"] == 0.5
    assert [list(item) for item in answer["items"]] == [["id", "score", "flags"]] * 2


def test_exported_samples_are_lines_in_the_longbench_shape(tmp_path):
    out = tmp_path / "s.jsonl"
    assert run_cli("tasks", "export", "retrieval", "--samples", "3", "--out", str(out)) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3
    assert all({"input", "context", "answers", "_id"} <= row.keys() for row in rows)


@pytest.mark.parametrize("name", ["submission", "nightly"])
def test_the_shipped_policies_judge_a_stored_run(tmp_path, capsys, name):
    folder = save(tmp_path / "r", make_stored(0.99))
    code = run_cli("gate", str(folder), "--policy", name, "--format", "json")
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["exit_code"] == code
    assert len(verdict["rules"]) >= 7


def test_the_shipped_embedded_spec_and_its_policy_are_sound():
    from evalgate.measure import load_spec

    spec, _ = load_spec(None, None)
    dtypes = {arm.args[arm.args.index("--dtype") + 1] for arm in spec.arms.values()}
    assert len(dtypes) == 1
    assert spec.arms["candidate"].patch == "int8_kv"
    assert sum(bucket.weight for bucket in spec.load.buckets) == pytest.approx(1.0)


def test_every_command_and_option_of_the_readme_exists(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^evalgate (.+?)(?: +#.*)?$", text, flags=re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        words = line.split()
        command = cli.cli.commands[words[0]]
        if words[0] == "tasks":
            command = command.commands[words[1]]
        options = {o for p in command.params for o in p.opts}
        assert {w for w in words if w.startswith("--")} <= options, line


def test_every_command_is_described(root):
    for name, command in cli.cli.commands.items():
        assert command.help, name
    readme = (root / "README.md").read_text(encoding="utf-8")
    for name in cli.cli.commands:
        assert f"evalgate {name}" in readme, name


def test_help_needs_no_heavy_module():
    code = (
        "import sys, evalgate.cli;"
        "heavy = {'numpy', 'scipy', 'pydantic', 'rich'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_printed(capsys):
    assert run_cli("--version") == 0
    assert re.search(r"\d+\.\d+\.\d+", capsys.readouterr().out)
