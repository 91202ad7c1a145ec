"""Which settings are secrets, and a server's arguments and environment without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

REMOVED = "(removed)"
_SECRET = r"(api[_-]?key|key|token|secret|password|passwd|credentials?)$"
_VARIABLE = re.compile(r"(?:^|_)" + _SECRET, re.IGNORECASE)
_FLAG = re.compile(r"^--(?:.*[-_])?" + _SECRET, re.IGNORECASE)


def is_secret_variable(name: str) -> bool:
    """True of HF_TOKEN or OPENAI_API_KEY, not of TOKENIZERS_PARALLELISM."""
    return _VARIABLE.search(name) is not None


def is_secret_flag(argument: str) -> bool:
    """True of --api-key, --hf-token, --hf_token (vLLM takes both) or --api-key=VALUE."""
    return _FLAG.match(argument.partition("=")[0]) is not None


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    return {k: REMOVED if is_secret_variable(k) else v for k, v in env.items()}


def redact_args(args: Sequence[str]) -> list[str]:
    """The arguments with the values of flags that name a secret removed."""
    shown: list[str] = []
    hide_next = False
    for argument in args:
        flag, equals, _ = argument.partition("=")
        if hide_next:
            shown.append(REMOVED)
            hide_next = False
        elif is_secret_flag(argument):
            shown.append(f"{flag}={REMOVED}" if equals else flag)
            hide_next = not equals
        else:
            shown.append(argument)
    return shown
