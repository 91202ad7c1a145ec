"""Verdicts and evidence that the report tests share. Figures of the source article where it has
them; foreign strings carry what would break a page, a table or a terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import factories
import msgspec
import numpy as np

from evalgate.metrics import compute_percentiles
from evalgate.records import LaunchEvidence, StoredRun
from evalgate.report import Context
from evalgate.trend import Night

HOSTILE = """<script>alert("x")</script>'"&|`@all`\x1b[31m"""
# The page's headings in their order, where everything was measured.
SECTIONS = [
    "What would settle the open rules",
    "Warnings",
    "Changes against margins",
    "Rules",
    "Accuracy by task and length",
    "Latency distributions",
    "Throughput (tokens/s)",
    "Latency (ms; percentiles by linear interpolation)",
    "Requests in order of execution",
    "Output lengths (tokens)",
    "Failed requests",
    "Outputs that differ",
    "Routes and launches",
    "Environment",
]


def make_rule(name: str = "tpot 8K-16K", **changes: Any) -> dict[str, Any]:
    rule = {
        "name": name,
        "metric": "tpot",
        "kind": "non_inferiority",
        "bucket": "8K-16K",
        "task": None,
        "status": "pass",
        "observed": -0.970,
        "ci_low": -1.21,
        "ci_high": -0.73,
        "margin": 1.0,
        "unit": "percent",
        "n_pairs": 120,
        "n_dropped": 0,
        "n_blocks": 6,
        "reason": "the upper 95 % bound -0.73 % is below +1.00 %",
        "details": {"method": "Student's t over launches"},
    }
    unknown = changes.keys() - rule.keys()
    assert not unknown, unknown
    return {**rule, **changes}


def make_verdict(status: str = "pass", **changes: Any) -> dict[str, Any]:
    codes = {"pass": 0, "fail": 1, "inconclusive": 3, "invalid": 4}
    verdict = {
        "schema_version": 1,
        "status": status,
        "exit_code": codes[status],
        "invalid_reasons": [],
        "warnings": [],
        "differing_fields": [],
        "rules": [make_rule()],
        "summary": {"baseline": make_summary(1.0), "candidate": make_summary(0.99)},
    }
    return {**verdict, **changes}


def make_summary(factor: float) -> dict[str, Any]:
    """A summary of 20 requests in one bucket, times multiplied by ``factor``."""
    return {
        "output_throughput": 12.319985 / factor,
        "normalised_output_throughput": 12.25 / factor,
        "weighted_output_throughput": None,
        "weighted_normalised_output_throughput": None,
        "buckets": {
            "8K-16K": {
                "n": 20,
                "output_throughput": 12.319985 / factor,
                "normalised_output_throughput": 12.25 / factor,
                "ttft_s": make_stats([0.9 * factor, 1.3 * factor]),
                "tpot_s": make_stats([0.0812 * factor]),
                "e2el_s": make_stats([]),
            }
        },
        "tasks": {
            "retrieval": {
                "n": 50,
                "mean": 0.9,
                "buckets": {"8K-16K": {"n": 50, "mean": 0.9 if factor == 1 else 0.88}},
            }
        },
    }


def make_stats(values: list[float]) -> dict[str, Any]:
    percents = (50, 90, 95, 99)
    found = compute_percentiles(values, percents)
    percentiles = {f"p{p}": value for p, value in zip(percents, found, strict=True)}
    return {"n": len(values), "mean": float(np.mean(values)) if values else None, **percentiles}


def make_rich_case(seed: int = 3) -> tuple[dict[str, Any], Context]:
    """A verdict with every status and kind of rule, and a run with faults of every kind."""
    stored = make_rich_run(seed)
    verdict = make_verdict(
        "fail",
        warnings=[
            "one launch in arm baseline had a load average of 3.2 on 2 cores",
            f"arm label {HOSTILE}",
        ],
        differing_fields=["arms.env.KERNELS_PATCH", "arms.kv_cache_dtype", HOSTILE],
        rules=make_rich_rules(),
        summary={arm: summarise(stored, arm) for arm in ("baseline", "candidate")},
    )
    return verdict, replace(Context.of_run(stored), title=f"nightly {HOSTILE}")


def make_rich_rules() -> list[dict[str, Any]]:
    noise = {"observed": 0.12, "ci_low": -0.3, "ci_high": 0.5, "smallest_effect": 0.38}
    same = {"share": 0.5, "base_against_base": 0.75}
    return [
        make_rule(
            "weighted normalised throughput",
            metric="weighted_normalised_output_throughput",
            kind="superiority",
            bucket=None,
            observed=0.536,
            ci_low=0.12,
            ci_high=0.95,
            margin=0.0,
            reason="the lower 95 % bound +0.12 % is above 0",
            details={
                "method": "Student's t over launches",
                "noise_floor": noise,
                "identical_outputs": same,
                "mde_percent": 0.41,
            },
        ),
        make_rule(
            "ttft 4K-8K", metric="ttft", bucket="4K-8K", observed=-0.295, ci_low=-1.1, ci_high=0.5
        ),
        make_rule(),
        make_rule(
            "tpot 16K-32K",
            bucket="16K-32K",
            observed=0.8,
            ci_low=-0.4,
            ci_high=2.1,
            status="inconclusive",
            n_dropped=3,
            reason="the bounds -0.40 % and +2.10 % lie on both sides of +1.00 %: about 9 "
            "more launches would settle it",
            details={"needed_more": {"unit": "launches", "more": 9}},
        ),
        make_rule(
            "ttft 16K-32K",
            metric="ttft",
            bucket="16K-32K",
            observed=38.2,
            ci_low=35.0,
            ci_high=41.0,
            status="fail",
            reason="the lower 95 % bound +35.00 % is above +1.00 %",
        ),
        make_rule(
            f"retrieval {HOSTILE}",
            metric="score",
            task="retrieval",
            bucket="16K-32K",
            observed=-20.0,
            ci_low=-31.0,
            ci_high=-11.0,
            margin=3.0,
            unit="points",
            status="fail",
            n_pairs=50,
            n_blocks=None,
            reason="the upper 95 % bound -11.00 points is below -3.00 points",
        ),
        make_rule(
            "hotpotqa",
            metric="score",
            task="hotpotqa",
            bucket=None,
            observed=0.0,
            ci_low=-0.6,
            ci_high=0.7,
            margin=1.0,
            unit="points",
            n_pairs=109,
            n_blocks=None,
        ),
        make_rule(
            "top-1 agreement",
            metric="top1_agreement",
            bucket=None,
            observed=None,
            ci_low=None,
            ci_high=None,
            margin=1.0,
            unit="points",
            status="inconclusive",
            n_pairs=0,
            n_blocks=0,
            reason="no fidelity records: run with the fidelity task",
        ),
    ]


def make_rich_run(seed: int) -> StoredRun:
    rng = np.random.default_rng(seed)
    requests = factories.simulate_requests(
        seed=seed, blocks=4, prompts=6, tpot_change=-0.0097, ttft_change=-0.003, request_sd=0.006
    )
    order = {"baseline": 0, "candidate": 1}
    requests.sort(key=lambda r: (r.block, r.prompt_id, order[r.arm]))
    placed = []
    for i, r in enumerate(requests):
        changes: dict[str, Any] = {
            "started_at": f"2026-11-29T02:{i // 60:02d}:{i % 60:02d}.000000Z"
        }
        if r.arm == "candidate" and rng.random() < 0.3:
            changes["output_text"] = f"{r.output_text}, but {HOSTILE} it goes on differently"
            changes["output_tokens"] = r.output_tokens + int(rng.integers(-9, 9))
        if i % 37 == 0:
            changes["phase"] = "warmup"
        if i == 50:
            changes["chunk_ns"] = [n * 5 for n in r.chunk_ns]
        placed.append(msgspec.structs.replace(r, **changes))
    placed[20] = factories.make_request(
        "candidate",
        bucket="4K-8K",
        prompt_id=HOSTILE,
        error="timeout",
        started_at="2026-11-29T02:00:20.500000Z",
    )
    samples = [
        factories.make_sample(
            arm,
            task=task,
            sample_id=f"{task}-{i}",
            score=float(rng.random() < 0.9),
            output_text="Rome" if arm == "baseline" or i % 5 else f"Paris {HOSTILE}",
        )
        for arm in order
        for task in ("hotpotqa", "gov_report", "retrieval", "aggregation")
        for i in range(12)
    ]
    return factories.make_stored(
        placed,
        samples,
        spec=factories.make_spec(blocks=4, prompts=6),
        arms={
            "baseline": factories.make_arm(blocks=4),
            "candidate": factories.make_arm(
                blocks=4,
                kv_cache_dtype="int8",
                env={"KERNELS_PATCH": "int8_kv"},
                routes={"first_chunk": 720, "prefix": 2160, "decode": 46080, "fallback": 0},
                environment=factories.make_environment(
                    packages={"torch": "2.13.0", "vllm": "0.32.0", HOSTILE: "1"}
                ),
                extra={
                    "evidence": [
                        LaunchEvidence(
                            block=b,
                            routes={"prefix": 540, "decode": 11520},
                            route_steps={"prefix": 18, "decode": 384},
                            layers=30,
                            kv_cache={"dtype": "int8", "bytes_per_token_per_layer": 408},
                            prefix_cache={"queries": 120000.0, "hits": 0.0},
                        ).model_dump()
                        for b in range(4)
                    ]
                },
            ),
        },
    )


def summarise(stored: StoredRun, arm: str) -> dict[str, Any]:
    """Enough of a summary to fill every table, by the records' own properties."""
    records = [r for r in stored.requests if r.arm == arm and not r.error and r.phase == "measure"]
    summary = make_summary(1.0)
    summary["buckets"] = {
        name: {
            "n": len(inside := [r for r in records if r.bucket == name]),
            "output_throughput": 12.3,
            "normalised_output_throughput": 12.4,
            **{
                k: make_stats([getattr(r, k) for r in inside])
                for k in ("ttft_s", "tpot_s", "e2el_s")
            },
        }
        for name, *_ in factories.BUCKETS
    }
    scores = {"hotpotqa": 0.7796, "gov_report": 0.3297, "retrieval": 1.0, "aggregation": 0.96}
    summary["tasks"] = {
        task: {
            "n": 109,
            "mean": score,
            "buckets": {
                name: {"n": 36, "mean": max(0.0, score - loss * (arm == "candidate"))}
                for (name, *_), loss in zip(factories.BUCKETS, (0.0, 0.02, 0.2), strict=True)
            },
        }
        for task, score in scores.items()
    }
    return summary


def make_night(day: int, factor: float = 1.0, status: str = "pass") -> Night:
    """A night whose candidate takes ``factor`` times the baseline's time."""
    summary = {"baseline": make_summary(1.0), "candidate": make_summary(factor)}
    return Night(
        f"night-{day:02d}", f"2026-11-{day:02d}T02:00:00Z", make_verdict(status, summary=summary)
    )


def make_noisy_nights(n: int, step_at: int | None = None, step: float = 0.0) -> list[Night]:
    noise = np.random.default_rng(4).normal(0, 0.003, n)
    return [
        make_night(i + 1, 1 + noise[i] + (step if step_at is not None and i >= step_at else 0))
        for i in range(n)
    ]
