"""What ran: calls of every layer and route, and what the scheduler asked for, counted apart.

A *step* is one batch that vLLM planned for the model; a *launch* is one forward of one layer for
one route in one step, so a step that holds a prefill and a decode costs each layer two launches.
Steps are counted where a step is planned and launches where a layer ran, so that
``launches == layers x route_steps`` for every route is evidence and not a tautology.

Profiling and warm-up runs carry no plan and are not counted. Nothing is ever reset: a reader takes
differences. The module knows no vLLM, no kernel and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

ROUTES = (
    "first_chunk",
    "prefix",
    "prefix_unpacked",
    "decode",
    "prefix_torch",
    "decode_torch",
    "fallback",
)


@dataclass(frozen=True)
class Planned:
    """One route's share of a step: its name, its requests and their query tokens."""

    route: str
    requests: int
    tokens: int


@dataclass
class RouteCounters:
    """Counters of one process: its layers in the order of their registration.

    ``launches`` is int64 [layers, routes]; the other three are int64 [routes].
    """

    layer_names: list[str] = field(default_factory=list)
    steps: int = 0
    launches: np.ndarray = field(default_factory=lambda: _zeros(0))
    route_steps: np.ndarray = field(default_factory=lambda: _zeros())
    route_tokens: np.ndarray = field(default_factory=lambda: _zeros())
    route_requests: np.ndarray = field(default_factory=lambda: _zeros())

    def __post_init__(self) -> None:
        self._row = {name: row for row, name in enumerate(self.layer_names)}

    def add_layers(self, names: Iterable[str]) -> None:
        """Give every new layer its row; a name that is known already keeps its counts."""
        for name in names:
            if name not in self._row:
                self._row[name] = len(self.layer_names)
                self.layer_names.append(name)
                self.launches = np.concatenate([self.launches, _zeros(1)])

    def counts_steps(self, names: Sequence[str]) -> bool:
        """Whether a builder of these layers counts the steps. vLLM plans every step once for each
        group of its cache, and the layers of all groups run it: the first layer's builder does."""
        return self.layer_names[0] in names

    def count_step(self, planned: Sequence[Planned]) -> None:
        """Count one planned step; two shares of one route (see ``fallback``) are one route step."""
        self.steps += 1
        for column in {ROUTES.index(share.route) for share in planned}:
            self.route_steps[column] += 1
        for share in planned:
            column = ROUTES.index(share.route)
            self.route_tokens[column] += share.tokens
            self.route_requests[column] += share.requests

    def count_launch(self, layer_name: str, route: str) -> None:
        """Count one forward of one layer. Raises KeyError for a layer that was never added."""
        self.launches[self._row[layer_name], ROUTES.index(route)] += 1

    def mismatches(self) -> list[str]:
        """Each route and layer whose launches differ from its steps, as a sentence; [] is proof."""
        return [
            f"layer {self.layer_names[row]} launched {route} {self.launches[row, column]} times "
            f"in {self.route_steps[column]} steps"
            for column, route in enumerate(ROUTES)
            for row in np.flatnonzero(self.launches[:, column] != self.route_steps[column])
        ]

    def as_dict(self) -> dict[str, object]:
        """The counters in plain Python types, for JSON."""
        totals = self.launches.sum(axis=0)
        return {
            "layers": len(self.layer_names),
            "layer_names": list(self.layer_names),
            "steps": self.steps,
            "routes": _by_route(totals),
            "route_steps": _by_route(self.route_steps),
            "tokens": _by_route(self.route_tokens),
            "requests": _by_route(self.route_requests),
            "per_layer": {
                route: self.launches[:, column].tolist() for column, route in enumerate(ROUTES)
            },
            "layers_mismatch": self.mismatches(),
        }


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros((*shape, len(ROUTES)), dtype=np.int64)


def _by_route(values: np.ndarray) -> dict[str, int]:
    return dict(zip(ROUTES, values.tolist(), strict=True))
