"""The HTTP transport that the clock is read in: a stamp for each network read, and deadlines.

httpx gives bodies piece by piece, after parsing, and one read time-out for every phase. Here the
time is taken where the bytes arrive, and each read waits no longer than the phase and the whole
request allow, so a far end that trickles bytes cannot stretch either. Knows no SSE and no JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any

import httpcore
import httpx

from evalgate.metrics import NS_PER_S

# vLLM closes an idle connection after 5 s: letting go first keeps a request out of that race.
KEEPALIVE_S = 4.0


class DeadlineError(Exception):
    """A phase took longer than it may. The message names the phase and the limit."""


class Wire:
    """What happened on the network since ``begin``, and until when it may go on.

    ``sent_ns``: first byte of the request written; ``stamp_ns``: end of the latest read;
    ``bytes_read``: of the answer; ``connected``: whether a new connection was opened.
    All times are of perf_counter_ns.
    """

    def __init__(self) -> None:
        self._phases: list[tuple[int, str]] = []
        self.begin()

    def begin(self, limit_s: float | None = None) -> None:
        """A request begins; ``limit_s`` bounds all of it."""
        self.sent_ns: int | None = None
        self.stamp_ns: int | None = None
        self.bytes_read = 0
        self.connected = False
        self._limit = self._make_phase("the whole request", limit_s)
        self._phase: tuple[int, str] | None = None

    def enter_phase(self, name: str, limit_s: float) -> None:
        """From now on ``name`` is waited for, ``limit_s`` seconds at most."""
        self._phase = self._make_phase(name, limit_s)

    def remaining_s(self) -> float | None:
        """Seconds that may still be waited, None without a limit. Raises DeadlineError at 0."""
        phases = [p for p in (self._phase, self._limit) if p is not None]
        if not phases:
            return None
        deadline_ns, text = min(phases)
        remaining = (deadline_ns - perf_counter_ns()) / NS_PER_S
        if remaining <= 0:
            raise DeadlineError(text)
        return remaining

    @staticmethod
    def _make_phase(name: str, limit_s: float | None) -> tuple[int, str] | None:
        if limit_s is None:
            return None
        return perf_counter_ns() + int(limit_s * NS_PER_S), f"{name} took more than {limit_s:g} s"


class WireTransport(httpx.HTTPTransport):
    """httpx over HTTP/1.1, one kept connection, its network read through a Wire."""

    def __init__(self, wire: Wire, *, tls: bool) -> None:
        context = httpx.create_ssl_context(verify=tls)  # loading the authorities takes time
        super().__init__(verify=context, trust_env=False)
        # httpx has no parameter for the network backend, httpcore's pool does.
        self._pool = httpcore.ConnectionPool(
            ssl_context=context,
            max_connections=1,
            max_keepalive_connections=1,
            keepalive_expiry=KEEPALIVE_S,
            network_backend=_WireBackend(wire),
        )


class _WireBackend(httpcore.NetworkBackend):
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        self._wire.connected = True
        return _WireStream(stream, self._wire)


class _WireStream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream, wire: Wire) -> None:
        self._inner = inner
        self._wire = wire

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        remaining = self._wire.remaining_s()
        try:
            data = self._inner.read(max_bytes, timeout if remaining is None else remaining)
        except httpcore.ReadTimeout:
            self._wire.remaining_s()  # names the phase that ran out
            raise
        self._wire.stamp_ns = perf_counter_ns()
        self._wire.bytes_read += len(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._wire.sent_ns is None:
            self._wire.sent_ns = perf_counter_ns()
        remaining = self._wire.remaining_s()
        self._inner.write(buffer, timeout if remaining is None else remaining)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _WireStream(self._inner.start_tls(ssl_context, server_hostname, timeout), self._wire)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
