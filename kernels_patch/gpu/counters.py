"""Launches counted where they run: in device memory, so that CUDA-graph replay counts too.

Steps are counted on the host, where they are planned (kernels_patch/counters.py says why that makes
evidence). The kernels of a captured graph raise the device's counters at every replay, and also in
the warm-up before the capture, which no plan knows: counting begins anew with the first step after
a capture. Cache writes that rotate too are counted beside the routes, as they serve any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels_patch.counters import ROUTES, Planned, RouteCounters


class DeviceRouteCounters(RouteCounters):
    """The counters of one process with one device. ``tick`` is what a launch raises by one, and
    ``rope_tick`` what a write does that rotates: int64 [1] on the device, of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self._device_launches: torch.Tensor | None = None
        self._ticks: dict[str, tuple[torch.Tensor, ...]] = {}
        self._begins_anew = False

    def place(self, names: Sequence[str], device: torch.device | str) -> None:
        """Give every new layer its counters on ``device``.

        Addresses change only when a layer is new: graphs hold them.
        """
        self.add_layers(names)
        old = self._device_launches
        if old is not None and len(old) == len(self.layer_names):
            return
        shape = (len(self.layer_names), len(ROUTES) + 1)  # the last: writes that rotate
        launches = torch.zeros(shape, dtype=torch.int64, device=device)
        if old is not None:
            launches[: len(old)] = old
        self._device_launches = launches
        self._ticks = {
            name: tuple(launches[row].split(1)) for row, name in enumerate(self.layer_names)
        }

    def tick(self, layer_name: str, route: str) -> torch.Tensor:
        return self._ticks[layer_name][ROUTES.index(route)]

    def rope_tick(self, layer_name: str) -> torch.Tensor:
        return self._ticks[layer_name][-1]

    def begin_anew(self) -> None:
        """Forget what was counted, steps and launches alike, before anything more is counted."""
        self._begins_anew = True

    def count_step(self, planned: Sequence[Planned]) -> None:
        self._settle()
        super().count_step(planned)

    def as_dict(self) -> dict[str, object]:
        """The counters in plain Python types; waits for the device."""
        self._settle()
        rope_writes: list[int] = []
        if self._device_launches is not None:
            counts = self._device_launches.cpu().numpy()
            self.launches, rope_writes = counts[:, :-1], counts[:, -1].tolist()
        return {**super().as_dict(), "rope_writes": rope_writes}

    def _settle(self) -> None:
        if not self._begins_anew:
            return
        self._begins_anew = False
        self.steps = 0
        for counts in (self.route_steps, self.route_tokens, self.route_requests):
            counts[:] = 0
        if self._device_launches is not None:
            self._device_launches.zero_()
