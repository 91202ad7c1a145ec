"""What the commands that measure do: `evalgate run` and `evalgate doctor`.

The measuring half and the judging half meet here: a run is measured into a folder, and what lies in
the folder is judged. Nothing is parsed and nothing printed here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evalgate import report
from evalgate.commands import Answer, load_calibration
from evalgate.doctor import Diagnosis, compute_exit_code, diagnose, render_json, render_text
from evalgate.embedded import build_embedded_spec
from evalgate.errors import EXIT_PASS, SpecError, UsageError
from evalgate.policy import check_names, parse_policy
from evalgate.preflight import Finding
from evalgate.progress import RunProgress
from evalgate.records import BASELINE, CANDIDATE, StoredRun
from evalgate.run import UntilDecided, execute, resume
from evalgate.spec import Spec, parse_spec
from evalgate.stopping import TimeLimit
from evalgate.store import load_run
from evalgate.verdicts import (
    REPORT_FILES,
    check_calibration,
    choose_policy,
    compute_calibration_exit,
    describe_false_alarms,
    is_calibration,
    judge_run,
    list_open_rules,
    load_policy_table,
    read_policy,
    read_shipped,
    write_reports,
)

RESULTS = Path("results")


def measure(
    *,
    spec: str | None,
    out: str | None,
    resume_dir: str | None,
    calibrate: bool,
    calibration: str | None,
    policy: str | None,
    until_decided: bool,
    max_minutes: float | None,
    kind: str,
) -> Answer:
    """`evalgate run`: measure, judge, write the reports beside the records.

    No block is begun that would end after ``max_minutes``. With ``until_decided`` blocks are added
    until every rule is decided, or those minutes are spent.
    """
    limit = None if max_minutes is None or until_decided else TimeLimit(max_minutes)
    if resume_dir is not None and spec is None and policy is not None:
        raise UsageError(
            f"--resume goes on with the policy that the run began with: drop --policy, and judge "
            f"afterwards by `evalgate gate {resume_dir} --policy {policy}`"
        )
    noise = load_calibration(calibration)

    def open_rules(folder: Path) -> list[str]:
        stored = load_run(folder)
        return list_open_rules(stored, choose_policy(None, stored.run, stored.label), noise)

    if resume_dir is not None:
        given = load_spec(spec, policy)[0] if spec is not None else None
        with RunProgress() as progress:
            folder = resume(Path(resume_dir), progress, given, open_rules, limit)
    else:
        resolved, notes = load_spec(spec, policy)
        if noise is not None:
            check_calibration(noise, resolved.model.name)
        folder = Path(out) if out else default_out_dir(resolved.name)
        until = None
        if until_decided and max_minutes is not None:
            until = UntilDecided(max_minutes, find_min_blocks(resolved), open_rules)
        with RunProgress() as progress:
            for warning in foresee(resolved, calibrate=calibrate, adds_launches=until is not None):
                progress.say(f"warning: {warning}")
            folder = execute(
                resolved,
                folder,
                progress,
                calibrate=calibrate,
                notes=notes,
                until=until,
                limit=limit,
            )
    return judge_measured(load_run(folder), folder, noise, kind)


def diagnose_all(spec: str | None, kind: str) -> Answer:
    """`evalgate doctor`: every check of a run of ``spec`` into the usual place."""
    resolved, _ = load_spec(spec, None)
    with RunProgress() as progress:
        found = diagnose(
            resolved, default_out_dir(resolved.name), lambda name: progress.say(f"checking {name}")
        )
    found += [Diagnosis("policy", Finding("warning", text)) for text in foresee(resolved)]
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
    spec = spec.model_copy(update={"policy": table})
    if table is not None:
        checked = parse_policy(table, policy or (name or "embedded default"))
        if {BASELINE, CANDIDATE} <= spec.arms.keys():
            check_names(checked, [bucket.name for bucket in spec.load.buckets], list(spec.tasks))
    return spec, notes


def foresee(spec: Spec, *, calibrate: bool = False, adds_launches: bool = False) -> list[str]:
    """What of the policy this spec cannot satisfy, however well it goes: better known before."""
    if not {BASELINE, CANDIDATE} <= spec.arms.keys():
        return []
    policy, found = read_policy(spec.policy, spec.name), []
    blocks, wanted = spec.schedule.blocks, policy.validity.min_blocks
    if blocks < wanted and not adds_launches:
        found.append(
            f"the policy wants {wanted} launches of each arm and the spec makes {blocks}, so rules "
            f"of speed will stay open: set schedule.blocks to {wanted}"
        )
    open_rules = [rule.name for rule in policy.rules if rule.definition.source == "fidelity"]
    if open_rules and spec.fidelity is None:
        found.append(
            f"the spec has no [fidelity], so {', '.join(open_rules)} will stay open: add it, or "
            "drop the rule"
        )
    routes = policy.validity.require_routes
    if routes and spec.arms[CANDIDATE].patch is None and not calibrate:
        found.append(
            f"the policy requires the routes {', '.join(routes)} and the candidate has no patch "
            "that counts any, so the run will be invalid: set its patch, or require none"
        )
    return found


def find_min_blocks(spec: Spec) -> int:
    """The launches that the spec's policy asks for. Raises UsageError where nothing is judged."""
    if not {BASELINE, CANDIDATE} <= spec.arms.keys():
        raise UsageError(
            f"spec {spec.name!r} has the arms {', '.join(spec.arms)}: --until-decided needs "
            f"{BASELINE} and {CANDIDATE}, as one arm has no verdict"
        )
    return read_policy(spec.policy, spec.name).validity.min_blocks


def default_out_dir(name: str) -> Path:
    """A new folder below RESULTS; the name of a spec cannot lead out of it."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return RESULTS / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{stamp}"
