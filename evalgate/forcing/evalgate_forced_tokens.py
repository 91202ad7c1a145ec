"""A logits processor for vLLM that makes a request say given tokens, one by one, in decode.

A server loads it with ``--logits-processors evalgate_forced_tokens:ForcedTokens`` when this file's
folder is on its PYTHONPATH; a request asks for it with ``vllm_xargs: {"forced_token_ids": [..]}``.
Other requests pass untouched, as does this one after its last forced token. Log-probabilities in
vLLM's default mode, ``raw_logprobs``, are taken before any processor: they are the model's own.

The file stands alone, for the server's interpreter may have no evalgate. It serves both of vLLM's
model runners, which ask for two different interfaces under the same flag: the first knows requests
by their row in the batch and hands over their output so far, the second by a slot and a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as RowProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor
except ImportError:  # vLLM 0.26 and before: the second runner takes no processors
    SlotProcessor = object

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

ARGUMENT = "forced_token_ids"


class ForcedTokens(RowProcessor, SlotProcessor):
    """Leaves the forced token as the only one that can be sampled.

    Built as (config, device, is_pin_memory) by the first runner, as (config, request state) by the
    second. Raises ValueError under speculative decoding, where a step makes several tokens.
    """

    def __init__(self, vllm_config: VllmConfig, *place: Any) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError("forced tokens need one token a step: serve without speculation")
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._slots = place[0] if len(place) == 1 else None
        self._by_row: dict[int, tuple[list[int], list[int]]] = {}  # forced, output so far
        self._by_slot: dict[int, list[int]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError, a 400 to whoever asked, for anything but a list of token ids."""
        forced = _read_forced(sampling_params)
        if forced is None:
            return
        if not isinstance(forced, list) or not forced:
            raise ValueError(f"{ARGUMENT} is {forced!r}: give a list of token ids")
        for token in forced:
            if type(token) is not int or token < 0:
                raise ValueError(f"{ARGUMENT} holds {token!r}, which is no token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._by_row, batch_update, _make_row)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        forced = _read_forced(sampling_params)
        if forced is None:
            self._by_slot.pop(req_idx, None)
        else:
            self._by_slot[req_idx] = forced
        return forced is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """logits [rows, vocabulary], changed in place."""
        choices = self._choose_by_row() if ctx is None else self._choose_by_slot(ctx)
        # An id outside the vocabulary would end the engine; unforced, whoever asked sees it.
        choices = {row: token for row, token in choices.items() if token < self._vocab_size}
        if choices:
            rows = torch.tensor(list(choices), device=logits.device)
            tokens = torch.tensor(list(choices.values()), device=logits.device)
            logits[rows] = -torch.inf
            logits[rows, tokens] = 0.0
        return logits

    def _choose_by_row(self) -> dict[int, int]:
        # The output's length is right even while its last token is still a placeholder.
        return {
            row: forced[len(output)]
            for row, (forced, output) in self._by_row.items()
            if len(output) < len(forced)
        }

    def _choose_by_slot(self, ctx: LogitsContext) -> dict[int, int]:
        if not self._by_slot:
            return {}
        choices = {}
        lengths = zip(ctx.idx_mapping_np, ctx.seq_lens_upper_bound_np, strict=False)
        for row, (slot, length) in enumerate(lengths):
            forced: Sequence[int] = self._by_slot.get(int(slot), ())
            # Below 0 while the prompt is still being read: what is sampled there is thrown away.
            index = int(length) - int(self._slots.prompt_len.np[slot])
            if 0 <= index < len(forced):
                choices[row] = forced[index]
        return choices


def _read_forced(params: SamplingParams) -> Any:
    return (params.extra_args or {}).get(ARGUMENT)


def _make_row(
    params: SamplingParams, _: list[int] | None, output: list[int]
) -> tuple[list[int], list[int]] | None:
    forced = _read_forced(params)
    return None if forced is None else (forced, output)
