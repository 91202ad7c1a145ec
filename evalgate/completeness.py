"""Is everything there that a run says it measured? Records that one arm lacks are seen beside the
other's; what both arms lack is only missed when the spec is asked how much there should be.

A file that was cut at the end of a line reads well, and what was measured last is gone from both
arms. Pure; knows no server and no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from evalgate.compare import ArmView


def check_recorded(*sides: ArmView) -> list[str]:
    """A reason for each arm with fewer measured requests in a completed block and bucket than its
    spec asks for. A run that does not say which blocks it completed is not asked."""
    return [reason for side in sides if (reason := _find_missing(side))]


def _find_missing(side: ArmView) -> str | None:
    found = Counter((record.block, record.bucket) for record in side.measured)
    missing = [
        (block, bucket, found[block, bucket], wanted)
        for block in _list_completed(side)
        for bucket, wanted in _list_wanted(side)
        if found[block, bucket] < wanted
    ]
    if not missing:
        return None
    block, bucket, there, wanted = missing[0]
    lost = sum(wanted - there for _, _, there, wanted in missing)
    return (
        f"{side.title}: {lost} measured requests of completed blocks are missing (first: block "
        f"{block}, bucket {bucket}, {there} of {wanted}); the folder is not whole: restore "
        "requests.jsonl, or run again"
    )


def _list_completed(side: ArmView) -> list[int]:
    blocks = (side.run.extra or {}).get("completed_blocks")
    return [b for b in blocks if type(b) is int] if isinstance(blocks, list) else []


def _list_wanted(side: ArmView) -> Iterator[tuple[str, int]]:
    """Buckets of the spec, and the measured requests of one block in each."""
    schedule: Any = side.run.spec.get("schedule")
    repetitions = schedule.get("repetitions", 1) if isinstance(schedule, dict) else 1
    for bucket in side.load_spec.get("buckets") or []:
        prompts = bucket.get("prompts") if isinstance(bucket, dict) else None
        if type(prompts) is int and type(repetitions) is int:
            yield str(bucket.get("name")), prompts * repetitions
