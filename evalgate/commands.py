"""What the commands that judge do, between the parsed command line and the printed answer.

They read what lies in run directories. What measures is in ``measure``, which is imported by the
commands that need it alone, as a judgement should not wait for it. Nothing is parsed and nothing
printed here.
"""

from __future__ import annotations

import gc
import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evalgate import report
from evalgate.errors import EXIT_PASS, EvalgateError, UsageError
from evalgate.gate import Verdict, judge
from evalgate.policy import Policy
from evalgate.records import BASELINE, RUN_FILE, StoredRun
from evalgate.store import load_run
from evalgate.verdicts import (
    choose_policy,
    is_calibration,
    judge_run,
    load_view,
    warn_of_calibration,
)

# What of a policy's rules says what was gained end to end, best first.
GAIN_METRICS = ("weighted_normalised_output_throughput", "normalised_output_throughput")


@dataclass(frozen=True)
class Answer:
    text: str
    exit_code: int


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
    verdict = judge_run(stored, chosen, load_calibration(calibration))
    if explained:
        from evalgate.explain import explain

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
    noise = load_calibration(calibration)
    verdict = judge(
        base,
        cand,
        chosen,
        calibration=noise,
        allow=allow,
        apart=base.run.run_id != cand.run.run_id,
    )
    verdict = warn_of_calibration(verdict, noise, base)
    if profile is not None:
        verdict = replace(verdict, warnings=[*verdict.warnings, bound_gain(verdict, profile)])
    context = report.Context.of_views(base, cand)
    return Answer(report.render(kind, verdict.to_json(), context), verdict.exit_code)


def bound_gain(verdict: Verdict, profile: str) -> str:
    """Amdahl's bound of a profile beside the length-normalised throughput that was measured: of all
    buckets where a rule is about that, else of the bucket that gained most for certain."""
    from evalgate.amdahl import compute_attention_share, compute_bound, parse_profile

    path = Path(profile)
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise UsageError(
            f"profile {profile!r} cannot be read ({exc}): name a Kineto trace (JSON, or .json.gz) "
            "or a CSV of kernel times"
        ) from None
    share = compute_attention_share(parse_profile(text, profile), where=profile)
    gains = [r for metric in GAIN_METRICS for r in verdict.rules if r.rule.metric == metric]
    gains = [r for r in gains if r.rule.metric == gains[0].rule.metric]
    measured = max(gains, key=lambda r: -math.inf if r.ci_low is None else r.ci_low, default=None)
    bound = compute_bound(
        share,
        measured_percent=measured.observed if measured else None,
        measured_low=measured.ci_low if measured else None,
    )
    where = f" (rule {measured.rule.name})" if measured else ""
    return bound.describe() + where


def show_trend(results: str, pinned: str | None, kind: str) -> Answer:
    """`evalgate trend`: every run in the folder that holds both arms, each judged again now.

    Runs that cannot be read or have one arm are skipped by name in the answer.
    """
    from evalgate.report.trend import render_trend
    from evalgate.trend import Night, build_trend

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


def load_calibration(folder: str | None) -> StoredRun | None:
    """The run that --calibration names. Raises UsageError for one that was not made for it."""
    if folder is None:
        return None
    stored = load_run(Path(folder))
    if not is_calibration(stored.run):
        raise UsageError(f"{folder} is not a calibration: make one with `evalgate run --calibrate`")
    if stored.run.status != "complete":
        raise UsageError(f"calibration {folder} is {stored.run.status!r}: resume it with --resume")
    return stored
