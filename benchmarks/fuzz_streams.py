"""Mutated streams against the client: none may crash it, none may pass for another answer.

Each is a right stream in vLLM's form (token ids, usage, [DONE]) after one to four mutations: bytes
flipped, dropped or doubled; events dropped, doubled, swapped or cut off; noise put in; line ends
changed; cut into reads anywhere. A success is wrong when its token ids or its count are not those
that were sent. Counted apart, as no reader could tell: a letter or a digit changed inside a value,
and a lost event made up for by a doubled one.

    python benchmarks/fuzz_streams.py --streams 10000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx

from evalgate.client import Client
from evalgate.generation import Generation

PIECES = ["Hé", "llo", " wor", "ld", " \U0001f600", "!", "\u2028", '"quoted"', "\\n", "end"]


class Reads(httpx.SyncByteStream):
    def __init__(self, reads: list[bytes]) -> None:
        self._reads = reads

    def __iter__(self) -> Iterator[bytes]:
        yield from self._reads


def build_events(rng: random.Random) -> tuple[list[bytes], str, list[int]]:
    """Events of a right stream, its text and its token ids."""
    count = rng.randint(1, 12)
    pieces = [rng.choice(PIECES) for _ in range(count)]
    ids = [rng.randint(0, 50_000) for _ in range(count + 1)]
    events = [
        encode({"choices": [{"index": 0, "text": p, "token_ids": [i], "finish_reason": None}]})
        for p, i in zip(pieces, ids, strict=False)
    ]
    last = {"index": 0, "text": "", "token_ids": [ids[-1]], "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": count + 1}
    events += [encode({"choices": [last]}), encode({"choices": [], "usage": usage})]
    return [*events, b"data: [DONE]\n\n"], "".join(pieces), ids


def encode(data: object) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def flip_byte(rng: random.Random, events: list[bytes]) -> None:
    at = rng.randrange(len(events))
    event = bytearray(events[at])
    event[rng.randrange(len(event))] = rng.randrange(256)
    events[at] = bytes(event)


def drop_bytes(rng: random.Random, events: list[bytes]) -> None:
    at = rng.randrange(len(events))
    start = rng.randrange(len(events[at]))
    events[at] = events[at][:start] + events[at][start + rng.randint(1, 20) :]


def double_bytes(rng: random.Random, events: list[bytes]) -> None:
    at = rng.randrange(len(events))
    start = rng.randrange(len(events[at]))
    piece = events[at][start : start + rng.randint(1, 20)]
    events[at] = events[at][:start] + piece + events[at][start:]


def drop_event(rng: random.Random, events: list[bytes]) -> None:
    del events[rng.randrange(len(events))]


def double_event(rng: random.Random, events: list[bytes]) -> None:
    at = rng.randrange(len(events))
    events.insert(at, events[at])


def swap_events(rng: random.Random, events: list[bytes]) -> None:
    a, b = rng.randrange(len(events)), rng.randrange(len(events))
    events[a], events[b] = events[b], events[a]


def cut_off(rng: random.Random, events: list[bytes]) -> None:
    at = rng.randrange(len(events))
    events[at:] = [events[at][: rng.randrange(len(events[at]))]]


def insert_noise(rng: random.Random, events: list[bytes]) -> None:
    noise = [
        b": ping\n\n",
        b"\n",
        b"\r",
        b"event: x\n",
        b"retry: 5\r\n",
        b"data\n",
        b"\xef\xbb\xbf",
    ]
    noise += [b"data: {}\n\n", b"data: null\n\n", b'data: {"error": {"message": "x"}}\n\n']
    events.insert(rng.randint(0, len(events)), rng.choice(noise))


def change_line_ends(rng: random.Random, events: list[bytes]) -> None:
    end = rng.choice([b"\r\n", b"\r"])
    events[:] = [event.replace(b"\n", end) for event in events]


# Those that leave each event's bytes alone: after them even the text must be right.
WHOLE: list[Callable[[random.Random, list[bytes]], None]] = [
    drop_event,
    double_event,
    swap_events,
    cut_off,
    insert_noise,
    change_line_ends,
]
PARTS = [flip_byte, drop_bytes, double_bytes]


def cut_into_reads(rng: random.Random, stream: bytes) -> list[bytes]:
    edges = sorted(rng.randint(0, len(stream)) for _ in range(rng.randint(0, 8)))
    return [stream[a:b] for a, b in zip([0, *edges], [*edges, len(stream)], strict=True)]


def judge(answer: Generation, text: str, ids: list[int], mutations: set[str]) -> str:
    whole = not mutations & {mutate.__name__ for mutate in PARTS}
    if answer.error is not None:
        clean = answer.chunk_ns == [] and answer.output_tokens is None and answer.text is None
        return f"error: {answer.error.category}" if clean else "WRONG: latency of a failed request"
    if answer.token_ids == ids and answer.output_tokens in (len(ids), None):
        if answer.text == text:
            return "success, all right"
        return "WRONG: text" if whole else "success, a letter changed inside a string"
    if sorted(answer.token_ids or []) == sorted(ids) and answer.output_tokens in (len(ids), None):
        return "success, events out of order"
    if "double_event" in mutations and set(answer.token_ids or []) < set(ids):
        return "success, a lost event made up for by a doubled one"
    if not whole and answer.token_ids is not None and len(answer.token_ids) == len(ids):
        return "success, a digit changed inside a number"
    if answer.output_tokens is None:
        return "success without a usage, so without a token count"
    return "WRONG: tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    reads: list[bytes] = []

    def serve(request: httpx.Request) -> httpx.Response:
        headers = {"Content-Type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=Reads(reads))

    outcomes: Counter[str] = Counter()
    begun = time.monotonic()
    with Client("http://fuzz", "m", transport=httpx.MockTransport(serve)) as client:
        client.extensions = True
        for _ in range(args.streams):
            events, text, ids = build_events(rng)
            mutations = rng.choices(WHOLE + PARTS, k=rng.randint(1, 4))
            for mutate in mutations:
                if events:
                    mutate(rng, events)
                    events = [event for event in events if event]
            reads = cut_into_reads(rng, b"".join(events))
            answer = client.generate([1], 64)
            outcomes[judge(answer, text, ids, {m.__name__ for m in mutations})] += 1
    wall_s = time.monotonic() - begun
    for outcome, count in outcomes.most_common():
        print(f"{count:7d}  {outcome}")
    wrong = sum(count for outcome, count in outcomes.items() if outcome.startswith("WRONG"))
    summary = {
        "benchmark": "fuzz_streams",
        "streams": args.streams,
        "seed": args.seed,
        "wrong": wrong,
        "crashes": 0,  # one would have ended the program
        "wall_s": round(wall_s, 1),
        "python": platform.python_version(),
        "httpx": httpx.__version__,
        "machine": platform.platform(),
    }
    print(json.dumps(summary, separators=(",", ":")))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
