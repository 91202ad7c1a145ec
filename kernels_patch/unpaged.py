"""``solve``: decode attention of one token over an INT8 cache that is not paged.

Checks the call and hands it to the kernels of the tensors' device (C++, or Triton on a GPU). The
query is not quantised: it is attention over the dequantised cache, so only float32 rounding stands
between it and exact.
"""

from __future__ import annotations

import math

import torch

from kernels_patch import native

MAX_HEADS = 64
MAX_TOKENS = 32768


def solve(
    Q: torch.Tensor,
    K_int8: torch.Tensor,
    V_int8: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output: torch.Tensor,
    num_heads: int,
    seq_len: int,
    head_dim: int,
) -> None:
    """Write softmax(Q . (K * k_scale) / sqrt(D)) . (V * v_scale) into ``output``.

    Q and output float32 [H, D]; K_int8 and V_int8 int8 [H, S, D] in [-128, 127]; k_scale and
    v_scale float32 [H, S]; all on one CPU or one GPU. H 1 to 64, S 1 to 32768, D 4 or a multiple of
    8 up to 256. Raises ValueError for anything else, and ``native.NativeUnavailable`` where nothing
    was compiled.
    """
    H, S, D = num_heads, seq_len, head_dim
    if not (1 <= H <= MAX_HEADS and 1 <= S <= MAX_TOKENS):
        raise ValueError(f"num_heads {H}, seq_len {S}: give 1-{MAX_HEADS} and 1-{MAX_TOKENS}")
    if D != 4 and (D % 8 or not 8 <= D <= native.MAX_HEAD_DIM):
        raise ValueError(f"head_dim {D}: give 4 or a multiple of 8 up to {native.MAX_HEAD_DIM}")
    expected = {
        "Q": (Q, (H, D), torch.float32),
        "K_int8": (K_int8, (H, S, D), torch.int8),
        "V_int8": (V_int8, (H, S, D), torch.int8),
        "k_scale": (k_scale, (H, S), torch.float32),
        "v_scale": (v_scale, (H, S), torch.float32),
        "output": (output, (H, D), torch.float32),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != Q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: give {dtype} "
                f"{shape} on {Q.device}"
            )
    if Q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"solve has no kernel for {Q.device.type}: move the tensors to the CPU")
    inputs = [x.contiguous() for x in (Q, K_int8, V_int8, k_scale, v_scale)]
    result = output if output.is_contiguous() else torch.empty_like(inputs[0])
    if Q.device.type == "cpu":
        native.load().solve(*inputs, 1 / math.sqrt(D), result)
    else:
        from kernels_patch.gpu.solve import solve as solve_on_gpu

        with torch.cuda.device(Q.device):
            solve_on_gpu(*inputs, 1 / math.sqrt(D), result)
    if result is not output:
        output.copy_(result)
