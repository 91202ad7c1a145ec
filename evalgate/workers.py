"""What the workers of one server report of themselves, as one report of the whole.

An engine has one worker for each rank of tensor parallelism in each pipeline stage. Those of a
stage hold the same layers and must have done the same; stages hold other layers of the model and
must have run the same steps. The keys are those of the patch's report (``spec.Patch.report_rpc``).
Knows no server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from evalgate.errors import EvidenceError
from evalgate.validation import shorten, show_value

Report = dict[str, Any]

RANK, WORLD_SIZE = "rank", "world_size"  # which worker of how many; a patch may leave them out
NAMES, MODEL_LAYERS, PAGES = "layer_names", "model_layers", "kv_cache"
# How stages become one report; any other key must be the same in all of them.
ADDED = ("layers", MODEL_LAYERS)
CHAINED = (NAMES, "layers_mismatch", "rope_writes")
REMEDY = "see the server's log, and run again when every worker does its part"


def merge_reports(reports: Sequence[Any], least: int = 1) -> Report:
    """One report of all workers; ``least``: how many of them the server's arguments ask for.

    Layers, launches and pages of pipeline stages come together, what each step is counted by stays.
    Raises EvidenceError when a worker is missing or did otherwise than its fellows.
    """
    _check_complete(reports, least)
    stages: dict[tuple[str, ...], Report] = {}
    for report in reports:
        own = {key: value for key, value in report.items() if key != RANK}
        first = stages.setdefault(tuple(own.get(NAMES) or ()), own)
        if own != first:
            raise EvidenceError(
                f"its {len(reports)} workers report different {_list_differences(own, first)} of "
                f"the same layers, so one of them did not do what the others did; {REMEDY}"
            )
    # A stage without attention has nothing to show.
    serving = [stage for stage in stages.values() if stage.get(MODEL_LAYERS) != 0]
    return _join(serving) if len(serving) > 1 else (serving or list(stages.values()))[0]


def _check_complete(reports: Sequence[Any], least: int) -> None:
    for report in reports:
        if not isinstance(report, dict):
            raise EvidenceError(
                f"a worker answers {show_value(report)} instead of its report; {REMEDY}"
            )
    told = {report.get(WORLD_SIZE) for report in reports} - {None}
    if len(told) > 1:
        raise EvidenceError(f"its workers say that they are {_show(told)} in all; {REMEDY}")
    wanted = max(least, *told) if told else least
    if len(reports) < wanted:
        raise EvidenceError(
            f"{len(reports)} of its {wanted} workers answered, and nothing shows what the others "
            f"did; {REMEDY}"
        )
    if told and sorted(r.get(RANK, -1) for r in reports) != list(range(wanted)):
        ranks = [report.get(RANK) for report in reports]
        raise EvidenceError(f"its {wanted} workers answer as the ranks {ranks}; {REMEDY}")


def _join(stages: Sequence[Report]) -> Report:
    names = Counter(name for stage in stages for name in stage.get(NAMES) or ())
    if twice := [name for name, count in names.items() if count > 1]:
        raise EvidenceError(
            f"{len(twice)} layers ({twice[0]}, ...) are in workers that hold different layers, so "
            f"their launches would count twice; {REMEDY}"
        )
    joined: Report = {}
    for key in dict.fromkeys(key for stage in stages for key in stage):
        values = [stage.get(key) for stage in stages]
        if key in ADDED:
            joined[key] = sum(values)
        elif key in CHAINED:
            joined[key] = [item for value in values for item in value]
        elif key == "active":
            joined[key] = all(values)
        elif key == "routes":
            joined[key] = {route: sum(v[route] for v in values) for route in values[0]}
        elif key == "per_layer":
            joined[key] = {route: [n for v in values for n in v[route]] for route in values[0]}
        elif key == PAGES:
            joined[key] = _join_pages(values)
        elif any(value != values[0] for value in values):
            raise EvidenceError(
                f"its pipeline stages report different {key} ({_show(values)}), and every step "
                f"passes through all of them; {REMEDY}"
            )
        else:
            joined[key] = values[0]
    return joined


def _join_pages(pages: Sequence[Report | None]) -> Report | None:
    """Layers add up; what differs is a sorted list, as in one worker whose layers differ."""
    held = [page for page in pages if page is not None]
    if len(held) < len(pages):
        if held:
            raise EvidenceError(f"{len(held)} of {len(pages)} stages hold KV pages; {REMEDY}")
        return None
    joined: Report = {}
    for key in held[0]:
        values = [page.get(key) for page in held]
        if key == "layers":
            joined[key] = sum(values)
            continue
        flat = {x for value in values for x in (value if isinstance(value, list) else [value])}
        joined[key] = flat.pop() if len(flat) == 1 else sorted(flat)
    return joined


def _list_differences(own: Report, first: Report) -> str:
    return ", ".join(key for key in {**first, **own} if own.get(key) != first.get(key))


def _show(values: Any) -> str:
    return shorten(" and ".join(map(str, values)))
