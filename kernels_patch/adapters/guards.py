"""Stand before vLLM's other attention backends on CUDA: wanted for a decoder, they end the server.

Vision towers only ask some backends what they can do: those are the stock ones in everything but
``validate_configuration``, which vLLM calls when it chooses the attention of a layer and at no
other time. Whoever looks one of the others up is about to use it (latent attention, models that
bring their own), and that ends the server at once.
"""

from __future__ import annotations

from typing import Any, NoReturn

from kernels_patch.adapters.cuda import BACKEND_FLAGS
from kernels_patch.switches import SWITCH, stop_server

ASKED_BY_VISION = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


def __getattr__(name: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum.__members__.get(name)
    if member is None or not member.value:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in ASKED_BY_VISION:
        _stop(name)
    stock = resolve_obj_by_qualname(member.value)

    def validate_configuration(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        _stop(name)

    body = {"validate_configuration": classmethod(validate_configuration), "__module__": __name__}
    return type(name, (stock,), body)


def _stop(name: str) -> NoReturn:
    stop_server(
        f"{SWITCH} is set and vLLM is about to choose {name}, which the patch does not serve: add "
        f"{BACKEND_FLAGS}, or unset {SWITCH} where the model needs that kind of attention"
    )
