"""Stand before vLLM's other attention backends on CUDA: chosen for a decoder, they end the server.

A guard is the stock backend in everything but ``validate_configuration``, which vLLM calls when it
chooses the attention of a layer and at no other time: code that only asks a backend what it can do
(vision towers do) gets the stock answers.
"""

from __future__ import annotations

from typing import Any, NoReturn

from kernels_patch.adapters.cuda import BACKEND_FLAGS
from kernels_patch.switches import SWITCH, stop_server


def __getattr__(name: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum.__members__.get(name)
    if member is None or not member.value:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = resolve_obj_by_qualname(member.value)

    def validate_configuration(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        stop_server(
            f"{SWITCH} is set and vLLM is about to choose {name}, which the patch does not serve: "
            f"add {BACKEND_FLAGS} (latent attention is not served at all), or unset {SWITCH}"
        )

    body = {"validate_configuration": classmethod(validate_configuration), "__module__": __name__}
    return type(name, (stock,), body)
