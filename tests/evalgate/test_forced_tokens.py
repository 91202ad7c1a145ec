"""The logits processor inside the server, driven as each of vLLM's two model runners drives it."""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evalgate.replay import FORCED_ARGUMENT, FORCING_FOLDER, PROCESSOR

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402 (only where vLLM is installed)
from vllm.v1.sample.logits_processor import (  # noqa: E402
    BatchUpdate,
    MoveDirectionality,
    _load_logitsprocs_by_fqcns,
)
from vllm.v1.worker.gpu.sample.logits_processor.loader import (  # noqa: E402
    _load_v2_logitsprocs_by_fqcns,
)

VOCABULARY = 6


@pytest.fixture
def processor_type(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FORCING_FOLDER))
    (found,) = _load_logitsprocs_by_fqcns([PROCESSOR])
    return found


def make_config(speculative: Any = None) -> Any:
    model = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    return SimpleNamespace(model_config=model, speculative_config=speculative)


def force(*tokens: Any) -> SamplingParams:
    return SamplingParams(temperature=0, extra_args={FORCED_ARGUMENT: list(tokens)})


PLAIN = SamplingParams(temperature=0)


def sample(processor: Any, rows: int, ctx: Any = None) -> list[int]:
    """Greedy choice of each row of a batch whose model prefers token 1 everywhere."""
    logits = torch.zeros(rows, VOCABULARY)
    logits[:, 1] = 5.0
    args = (logits,) if ctx is None else (logits, ctx)
    return processor.apply(*args).argmax(dim=-1).tolist()


def test_both_runners_accept_the_class_under_the_same_name(processor_type):
    assert _load_v2_logitsprocs_by_fqcns([PROCESSOR]) == [processor_type]
    assert not processor_type(make_config(), "cpu", False).is_argmax_invariant()


def test_by_row_each_forced_token_takes_its_turn_and_the_model_goes_on_alone(processor_type):
    processor = processor_type(make_config(), torch.device("cpu"), False)
    output: list[int] = []
    processor.update_state(
        BatchUpdate(
            2, removed=[], added=[(0, PLAIN, [1], []), (1, force(4, 2), [1], output)], moved=[]
        )
    )
    assert sample(processor, 2) == [1, 4]
    output.append(-1)  # a placeholder: its token is not back from the device yet
    processor.update_state(None)
    assert sample(processor, 2) == [1, 2]
    output.append(-1)
    assert sample(processor, 2) == [1, 1]


def test_by_row_a_request_is_followed_when_it_moves_and_forgotten_when_it_leaves(processor_type):
    processor = processor_type(make_config(), torch.device("cpu"), False)
    added = [(0, force(4), [1], []), (1, PLAIN, [1], [])]
    processor.update_state(BatchUpdate(2, removed=[], added=added, moved=[]))
    swap = [(0, 1, MoveDirectionality.SWAP)]
    processor.update_state(BatchUpdate(2, removed=[], added=[], moved=swap))
    assert sample(processor, 2) == [1, 4]
    processor.update_state(BatchUpdate(1, removed=[1], added=[], moved=[]))
    assert sample(processor, 2) == [1, 1]
    processor.update_state(BatchUpdate(1, removed=[], added=[(0, force(5), [1], [])], moved=[]))
    processor.update_state(BatchUpdate(1, removed=[], added=[(0, PLAIN, [1], [])], moved=[]))
    assert sample(processor, 1) == [1]


def make_step(slots: list[int], lengths: list[int]) -> Any:
    return SimpleNamespace(
        idx_mapping_np=np.array(slots), seq_lens_upper_bound_np=np.array(lengths)
    )


def test_by_slot_the_position_says_which_token_is_due(processor_type):
    # Slot 3 holds a prompt of 10 tokens; the rows of a step come in any order.
    states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([0, 7, 0, 10])))
    processor = processor_type(make_config(), states)
    assert processor.add_request(3, force(4, 2)) is True
    assert processor.add_request(1, PLAIN) is False
    assert sample(processor, 2, make_step([1, 3], [9, 8])) == [1, 1]  # the prompt is being read
    assert sample(processor, 2, make_step([1, 3], [10, 10])) == [1, 4]
    assert sample(processor, 2, make_step([3, 1], [11, 11])) == [2, 1]
    assert sample(processor, 2, make_step([3, 1], [12, 12])) == [1, 1]


def test_by_slot_the_next_request_of_a_slot_starts_afresh(processor_type):
    states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([2])))
    processor = processor_type(make_config(), states)
    processor.add_request(0, force(4))
    processor.add_request(0, PLAIN)
    assert sample(processor, 1, make_step([0], [2])) == [1]


def test_a_token_outside_the_vocabulary_is_not_forced(processor_type):
    processor = processor_type(make_config(), torch.device("cpu"), False)
    added = [(0, force(VOCABULARY), [1], [])]
    processor.update_state(BatchUpdate(1, removed=[], added=added, moved=[]))
    assert sample(processor, 1) == [1]


@pytest.mark.parametrize("bad", ["4", [], [4, "2"], [-1], [True], [1.0]])
def test_what_is_no_list_of_token_ids_is_refused(processor_type, bad):
    params = SamplingParams(temperature=0, extra_args={FORCED_ARGUMENT: bad})
    with pytest.raises(ValueError, match=FORCED_ARGUMENT):
        processor_type.validate_params(params)


def test_other_requests_are_not_judged(processor_type):
    processor_type.validate_params(PLAIN)
    processor_type.validate_params(SamplingParams(extra_args={"other": 1}))
    processor_type.validate_params(force(0, 5))


def test_speculative_decoding_is_refused(processor_type):
    with pytest.raises(ValueError, match="without speculation"):
        processor_type(make_config(speculative=object()), "cpu", False)


def test_the_file_stands_alone():
    tree = ast.parse((FORCING_FOLDER / "evalgate_forced_tokens.py").read_text(encoding="utf-8"))
    roots = {
        node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    roots |= {
        a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    assert roots - sys.stdlib_module_names == {"torch", "vllm"}


def test_a_release_whose_second_runner_takes_no_processors_is_served_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample.logits_processor", None)
    # Set and deleted, so that what is imported here is gone afterwards.
    monkeypatch.setitem(sys.modules, "evalgate_forced_tokens", sys)
    monkeypatch.delitem(sys.modules, "evalgate_forced_tokens")
    monkeypatch.syspath_prepend(str(FORCING_FOLDER))
    (found,) = _load_logitsprocs_by_fqcns([PROCESSOR])
    assert object in found.__bases__
    processor = found(make_config(), torch.device("cpu"), False)
    forced = SamplingParams(extra_args={FORCED_ARGUMENT: [4]})
    processor.update_state(BatchUpdate(1, removed=[], added=[(0, forced, [1], [])], moved=[]))
    assert processor.apply(torch.zeros(1, VOCABULARY)).argmax() == 4
