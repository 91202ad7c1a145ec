"""Server-sent events out of raw bytes, however the network cut them.

Knows the grammar (WHATWG HTML, 9.2.6) and nothing of JSON, HTTP or time. Lines end with LF, CRLF or
a CR alone and nothing else, so that a raw U+2028 inside a string stays inside it; text is decoded
only once its line is whole.
"""

from __future__ import annotations

import re

MAX_LINE_BYTES = 16 * 1024 * 1024  # a far end that never ends a line must not fill the memory

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class SseError(ValueError):
    """Bytes that cannot be an event stream: not UTF-8, or beyond the size bound."""


class SseDecoder:
    """Feed it what was read, get back the data of every event that this completed."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._pieces: list[bytes] = []  # the line that is not whole yet
        self._piece_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._ended_with_cr = False
        self._first_line = True

    def feed(self, read: bytes) -> list[str]:
        """Data of the events completed by these bytes, in order.

        Raises SseError when a line or an event outgrows the bound, or is not UTF-8.
        """
        if not read:
            return []
        # A CR ends its line at once, or an event would wait for the next read; if that read begins
        # with LF, it belongs to the same line end.
        if self._ended_with_cr and read[:1] == b"\n":
            read = read[1:]
        self._ended_with_cr = read[-1:] == b"\r"
        *whole, rest = _LINE_END.split(read)
        events = []
        for line in whole:
            event = self._end_line(line)
            if event is not None:
                events.append(event)
        self._grow(rest)
        return events

    def finish(self) -> list[str]:
        """Data of an event whose lines are whole but which no blank line followed.

        The grammar drops it; servers exist that end their stream that way, and nothing of it is
        missing. A line that was cut is dropped.
        """
        self._pieces.clear()
        event = self._dispatch()
        return [] if event is None else [event]

    def _grow(self, piece: bytes) -> None:
        self._piece_bytes += len(piece)
        if self._piece_bytes > self._max_line_bytes:
            raise SseError(f"a line of the stream is longer than {self._max_line_bytes} bytes")
        if piece:
            self._pieces.append(piece)

    def _end_line(self, last_piece: bytes) -> str | None:
        self._grow(last_piece)
        line = b"".join(self._pieces)
        self._pieces.clear()
        self._piece_bytes = 0
        if self._first_line:
            line = line.removeprefix(_BOM)
            self._first_line = False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max_line_bytes:
                raise SseError(f"an event is longer than {self._max_line_bytes} bytes")
        return None

    def _dispatch(self) -> str | None:
        if not self._data:
            return None
        data = b"\n".join(self._data)
        self._data.clear()
        self._data_bytes = 0
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise SseError(f"the stream is not UTF-8 ({exc.reason} in {data[:80]!r})") from None
