"""One text through one route of one server: what is asked, and the trace out of the answer.

``decode``  the prompt is sent and a logits processor in the server (``forcing/``) makes the sampled
            tokens the text's, one decode step each; raw log-probabilities come with each
``prefix``  prompt and output are sent as one prompt with prompt log-probabilities

Knows vLLM's completions; neither arms nor records.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalgate.client import Client
from evalgate.errors import ServerAnswerError
from evalgate.log_probs import Trace, build_trace
from evalgate.routes import DECODE, PREFIX, split_prompt
from evalgate.validation import show_value
from evalgate.workers import merge_reports

FORCING_FOLDER = Path(__file__).resolve().parent / "forcing"
PROCESSOR = "evalgate_forced_tokens:ForcedTokens"
FORCED_ARGUMENT = "forced_token_ids"
COMPLETIONS = "/v1/completions"
TOP = 2  # the most likely token and, for the margin, the next; the text's own always comes too
# Greedy, spelt out: a model's generation_config would fill in what is left unsaid.
SAMPLING = {"temperature": 0, "top_p": 1, "repetition_penalty": 1}


@dataclass(frozen=True)
class Text:
    """A prompt and the output that is replayed after it, in token ids."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


def build_launch_additions(env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that let a launched server force tokens.

    ``env`` is the environment that it would be launched with; a PYTHONPATH there is kept.
    """
    path = os.pathsep.join(filter(None, [str(FORCING_FOLDER), env.get("PYTHONPATH", "")]))
    args = ["--logits-processors", PROCESSOR, "--logprobs-mode", "raw_logprobs"]
    return args, {"PYTHONPATH": path}


def select_indices(route: str, text: Text, chunk_tokens: int) -> list[int]:
    """Output tokens, counted from 0, whose logits the route makes.

    They are made where the token before is read. Decode reads all of the output; token 0 is left
    out, as the prompt's last chunk makes its logits. A prefix chunk reads what lies past the first
    ``chunk_tokens`` (--max-num-batched-tokens).
    """
    first = 1 if route == DECODE else max(0, chunk_tokens - len(text.prompt_ids) + 1)
    return list(range(first, len(text.output_ids)))


def compute_expected_tokens(route: str, text: Text, chunk_tokens: int) -> Counter[str]:
    """Query tokens by route that the replay through ``route`` must cost an arm.

    The first output token is made by the prompt's last chunk, each further one by a decode step.
    """
    read, tokens = len(text.prompt_ids), Counter()
    if route == DECODE:
        tokens[DECODE] += len(text.output_ids) - 1
    else:
        read += len(text.output_ids)
    for chunk_route, length in split_prompt(read, chunk_tokens):
        tokens[chunk_route] += length
    return +tokens


def answer_greedily(
    client: Client, prompt_ids: Sequence[int], max_tokens: int, salt: str, timeout_s: float
) -> tuple[Text, Trace]:
    """The server's own output and what it says of it; indices as of decode.

    Raises ServerError, EvidenceError for a value that is no number.
    """
    choice = _complete(client, prompt_ids, max_tokens, salt, timeout_s, {"logprobs": TOP})
    text = Text(prompt_ids, _read_token_ids(choice))
    return text, _read_output_trace(choice, text)


def replay_text(
    client: Client, route: str, text: Text, chunk_tokens: int, salt: str, timeout_s: float
) -> Trace:
    """What the server says of the output's tokens that ``route`` makes.

    Raises ServerError, EvidenceError for a value that is no number.
    """
    if route == DECODE:
        return _replay_decode(client, text, salt, timeout_s)
    return _replay_prefix(client, text, chunk_tokens, salt, timeout_s)


def read_counted_tokens(client: Client, rpc: str) -> Counter[str]:
    """Query tokens by route since the server's start, as its workers count them.

    Raises ServerError, and EvidenceError when the workers do not agree.
    """
    report = merge_reports(client.call_rpc(rpc))
    tokens = report.get("tokens")
    if not isinstance(tokens, dict):
        raise ServerAnswerError(f"{rpc} reports no tokens by route: {show_value(report)}")
    return Counter(tokens)


def _replay_decode(client: Client, text: Text, salt: str, timeout_s: float) -> Trace:
    forced = list(text.output_ids)
    asked = {"logprobs": TOP, "ignore_eos": True, "vllm_xargs": {FORCED_ARGUMENT: forced}}
    choice = _complete(client, text.prompt_ids, len(forced), salt, timeout_s, asked)
    said = _read_token_ids(choice)
    if said != forced:
        pairs = zip(said, forced, strict=False)
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(said), len(forced)))
        raise ServerAnswerError(
            f"the server was to say {len(forced)} given tokens and said {len(said)}, the first "
            f"{agreed} of them as given: launch it with --logits-processors {PROCESSOR}"
        )
    return _read_output_trace(choice, text)


def _replay_prefix(
    client: Client, text: Text, chunk_tokens: int, salt: str, timeout_s: float
) -> Trace:
    prompt_ids, output_ids = text.prompt_ids, text.output_ids
    indices = select_indices(PREFIX, text, chunk_tokens)
    asked = {"prompt_logprobs": TOP}
    choice = _complete(client, [*prompt_ids, *output_ids], 1, salt, timeout_s, asked)
    try:
        top = [choice["prompt_logprobs"][len(prompt_ids) + i] for i in indices]
        options = [
            {int(token): float(entry["logprob"]) for token, entry in position.items()}
            for position in top
        ]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):
        raise ServerAnswerError(
            f"the completion carries no log-probabilities of its prompt: {show_value(choice)}"
        ) from None
    return build_trace(indices, [output_ids[i] for i in indices], options)


def _complete(
    client: Client,
    prompt_ids: Sequence[int],
    max_tokens: int,
    salt: str,
    timeout_s: float,
    asked: Mapping[str, Any],
) -> dict[str, Any]:
    """The only choice of one greedy completion. Raises ServerError.

    The salt travels as its digest: vLLM refuses slashes and more than 128 characters.
    """
    body = {
        "model": client.model,
        "prompt": list(prompt_ids),
        "max_tokens": max_tokens,
        "cache_salt": hashlib.sha256(salt.encode()).hexdigest(),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **SAMPLING,
        **asked,
    }
    answer = client.post_json(COMPLETIONS, body, timeout_s)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ServerAnswerError(
            f"{client.base_url}{COMPLETIONS} gave not one choice: {show_value(answer)}"
        )
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    if details.get("cached_tokens"):
        raise ServerAnswerError(
            f"{details['cached_tokens']} prompt tokens came from the prefix cache, so no route ran "
            "for them: give every replay a cache salt of its own"
        )
    return choices[0]


def _read_output_trace(choice: Mapping[str, Any], text: Text) -> Trace:
    """``top_logprobs`` holds a {"token_id:N": value} for each output token."""
    indices = range(1, len(text.output_ids))
    try:
        top = choice["logprobs"]["top_logprobs"]
        options = [
            {int(name.removeprefix("token_id:")): float(value) for name, value in top[i].items()}
            for i in indices
        ]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):
        raise ServerAnswerError(
            f"the completion carries no log-probabilities by token id: {show_value(choice)}"
        ) from None
    return build_trace(indices, [text.output_ids[i] for i in indices], options)


def _read_token_ids(choice: Mapping[str, Any]) -> list[int]:
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ServerAnswerError(f"the completion carries no token ids: {show_value(choice)}")
    return ids
