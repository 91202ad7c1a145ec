"""What each command does, between the parsed command line and the printed answer.

The measuring half and the judging half meet here: a run is measured into a folder, and what lies in
the folder is judged. Nothing is parsed and nothing printed here.
"""

from __future__ import annotations

import gc
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evalgate import report
from evalgate.amdahl import compute_attention_share, compute_bound, parse_profile
from evalgate.doctor import compute_exit_code, diagnose, render_json, render_text
from evalgate.embedded import build_embedded_spec
from evalgate.errors import EXIT_PASS, EvalgateError, SpecError, UsageError
from evalgate.explain import explain
from evalgate.gate import Verdict, judge
from evalgate.policy import Policy, parse_policy
from evalgate.progress import RunProgress
from evalgate.records import RUN_FILE, StoredRun
from evalgate.report.trend import render_trend
from evalgate.run import UntilDecided, execute, resume
from evalgate.spec import BASELINE, CANDIDATE, Spec, parse_spec
from evalgate.store import load_run
from evalgate.trend import Night, build_trend
from evalgate.verdicts import (
    REPORT_FILES,
    choose_policy,
    compute_calibration_exit,
    describe_false_alarms,
    is_calibration,
    judge_run,
    list_open_rules,
    load_policy_table,
    load_view,
    read_policy,
    read_shipped,
    write_reports,
)

RESULTS = Path("results")
GAIN_METRIC = "weighted_normalised_output_throughput"


@dataclass(frozen=True)
class Answer:
    text: str
    exit_code: int


def measure(
    *,
    spec: str | None,
    out: str | None,
    resume_dir: str | None,
    calibrate: bool,
    calibration: str | None,
    policy: str | None,
    max_minutes: float | None,
    kind: str,
) -> Answer:
    """`evalgate run`: measure, judge, write the reports beside the records.

    With ``max_minutes`` blocks are added until every rule is decided, or the minutes are spent.
    """
    noise = _load_optional(calibration)

    def open_rules(folder: Path) -> list[str]:
        stored = load_run(folder)
        return list_open_rules(stored, choose_policy(None, stored.run, stored.label), noise)

    if resume_dir is not None:
        given = load_spec(spec, policy)[0] if spec is not None else None
        with RunProgress() as progress:
            folder = resume(Path(resume_dir), progress, given, open_rules)
    else:
        resolved, notes = load_spec(spec, policy)
        folder = Path(out) if out else default_out_dir(resolved.name)
        until = None
        if max_minutes is not None:
            until = UntilDecided(max_minutes, find_min_blocks(resolved), open_rules)
        with RunProgress() as progress:
            folder = execute(
                resolved, folder, progress, calibrate=calibrate, notes=notes, until=until
            )
    return judge_measured(load_run(folder), folder, noise, kind)


def diagnose_all(spec: str | None, kind: str) -> Answer:
    """`evalgate doctor`: every check of the machine for a run of ``spec`` into the usual place."""
    resolved, _ = load_spec(spec, None)
    with RunProgress() as progress:
        found = diagnose(
            resolved, default_out_dir(resolved.name), lambda name: progress.say(f"checking {name}")
        )
    text = render_json(found) if kind == "json" else render_text(found)
    return Answer(text, compute_exit_code(found))


def judge_measured(stored: StoredRun, folder: Path, noise: StoredRun | None, kind: str) -> Answer:
    """The verdict of a run that was just measured, with its report files."""
    if not {BASELINE, CANDIDATE} <= stored.run.arms.keys():
        arms = ", ".join(stored.run.arms)
        return Answer(
            f"measured {arms} into {folder} ({len(stored.requests)} requests, "
            f"{len(stored.samples)} samples); one arm has no verdict: compare it with another run "
            "by `evalgate compare`",
            EXIT_PASS,
        )
    policy = choose_policy(None, stored.run, stored.label)
    verdict = judge_run(stored, policy, noise)
    context = report.Context.of_run(stored)
    rendered = {k: report.render(k, verdict.to_json(), context) for k in REPORT_FILES}
    page = write_reports(folder, rendered)
    answer = report.render(kind, verdict.to_json(), context)
    if kind == "text":
        load = report.describe_other_load(stored.run)
        noise_line = f"other processes took {load}\n" if load else ""
        if is_calibration(stored.run) and verdict.status != "invalid":
            noise_line = f"{describe_false_alarms(verdict.to_json())}\n{noise_line}"
        answer = f"{answer.rstrip()}\n\n{noise_line}records and reports: {folder} (open {page})"
    code = verdict.exit_code
    if is_calibration(stored.run):
        code = compute_calibration_exit(verdict.to_json())
    return Answer(answer, code)


def judge_again(
    run_dir: str,
    policy: str | None,
    calibration: str | None,
    kind: str,
    *,
    explained: bool = False,
) -> Answer:
    """`evalgate gate` and `evalgate report`: a stored run under its own or another policy."""
    stored = load_run(Path(run_dir))
    chosen = choose_policy(policy, stored.run, stored.label)
    verdict = judge_run(stored, chosen, _load_optional(calibration))
    if explained:
        return Answer(explain(verdict), verdict.exit_code)
    text = report.render(kind, verdict.to_json(), report.Context.of_run(stored))
    return Answer(text, verdict.exit_code)


def compare_builds(
    baseline: str,
    candidate: str,
    policy: str | None,
    allow: Sequence[str],
    calibration: str | None,
    kind: str,
    profile: str | None = None,
) -> Answer:
    """`evalgate compare`: arms of stored runs, of one run or of two. With a profile of kernel
    times, what attention could give at most stands among the warnings."""
    base, cand = load_view(baseline), load_view(candidate)
    # The records live until the process ends: the collector need not go through them again.
    gc.freeze()
    chosen: Policy = choose_policy(policy, cand.run, cand.label)
    verdict = judge(
        base,
        cand,
        chosen,
        calibration=_load_optional(calibration),
        allow=allow,
        apart=base.run.run_id != cand.run.run_id,
    )
    if profile is not None:
        verdict = replace(verdict, warnings=[*verdict.warnings, bound_gain(verdict, profile)])
    context = report.Context.of_views(base, cand)
    return Answer(report.render(kind, verdict.to_json(), context), verdict.exit_code)


def bound_gain(verdict: Verdict, profile: str) -> str:
    """Amdahl's bound of a profile beside the weighted throughput that was measured."""
    path = Path(profile)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"profile {profile!r} cannot be read ({exc})") from None
    share = compute_attention_share(parse_profile(text, profile), where=profile)
    gains = [r for r in verdict.rules if r.rule.metric == GAIN_METRIC]
    measured = gains[0] if gains else None
    return compute_bound(
        share,
        measured_percent=measured.observed if measured else None,
        measured_low=measured.ci_low if measured else None,
    ).describe()


def show_trend(results: str, pinned: str | None, kind: str) -> Answer:
    """`evalgate trend`: every run in the folder that holds both arms, each judged again now.

    Runs that cannot be read or have one arm are skipped by name in the answer.
    """
    folder = Path(results)
    if not folder.is_dir():
        raise UsageError(f"no results folder {results!r}: name the folder that holds the runs")
    if (folder / RUN_FILE).exists():
        raise UsageError(f"{results} is a run: name the folder that holds it and other nights")
    nights, skipped = [], []
    for path in sorted(p.parent for p in folder.glob(f"*/{RUN_FILE}")):
        try:
            stored = load_run(path)
            if is_calibration(stored.run):
                continue
            verdict = judge_run(stored, choose_policy(None, stored.run, stored.label), None)
        except EvalgateError as exc:
            skipped.append(f"{path.name}: {exc}")
            continue
        subject = f"{stored.run.name} of {stored.run.arms[BASELINE].model}"
        nights.append(Night(path.name, stored.run.started_at, verdict.to_json(), subject))
    return Answer(render_trend(kind, build_trend(nights, pinned, skipped)), EXIT_PASS)


def load_spec(name: str | None, policy: str | None) -> tuple[Spec, list[str]]:
    """The spec to run and what the report must say about it; its policy is resolved to a table.

    Raises SpecError or PolicyError before anything is started.
    """
    notes: list[str] = []
    if name is None:
        spec, notes = build_embedded_spec(read_shipped("embedded.toml"))
        folder = Path.cwd()
    else:
        path = Path(name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise SpecError(f"spec {name!r} cannot be read ({exc}): name a TOML file") from None
        spec, folder = parse_spec(text, name), path.parent
    if policy is not None:
        table: Any = load_policy_table(policy, Path.cwd())
    elif isinstance(spec.policy, str):
        table = load_policy_table(spec.policy, folder)
    else:
        table = spec.policy
    if table is not None:
        parse_policy(table, policy or (name or "embedded default"))
    return spec.model_copy(update={"policy": table}), notes


def find_min_blocks(spec: Spec) -> int:
    """The launches that the spec's policy asks for. Raises UsageError where nothing is judged."""
    if not {BASELINE, CANDIDATE} <= spec.arms.keys():
        raise UsageError(
            f"spec {spec.name!r} has the arms {', '.join(spec.arms)}: --until-decided needs "
            f"{BASELINE} and {CANDIDATE}, as one arm has no verdict"
        )
    return read_policy(spec.policy, spec.name).validity.min_blocks


def default_out_dir(name: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return RESULTS / f"{name}-{stamp}"


def _load_optional(folder: str | None) -> StoredRun | None:
    if folder is None:
        return None
    stored = load_run(Path(folder))
    if not is_calibration(stored.run):
        raise UsageError(f"{folder} is not a calibration: make one with `evalgate run --calibrate`")
    return stored
