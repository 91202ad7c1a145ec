"""Which token each lane of a 16x16x32 INT8 matrix instruction consumes: a model in NumPy.

A wave of 64 lanes multiplies A [16 rows, 32] by B [32, 16 columns] into INT32 [16, 16]. Lane l is
number l % 16 of slice l // 16; it holds 8 of the 32 summed elements of row (A) or column (B)
l % 16, and 4 of the 16 sums of column l % 16. For the second product of attention A is W (16 query
rows), B is V (16 output dimensions) and the summed elements are tokens.

A wave covers 64 tokens in two instructions. A lane fetches 16 neighbouring tokens of its dimension
with one 16-byte load, slice s those from 16 * s on; the first instruction eats the first half of
every lane's 16, the second the other half. So an instruction owns four slices of 8 tokens that are
16 apart, not 32 neighbours, and W must be scaled over what an instruction owns: its INT32 sums come
back to float with one scale. The two mistakes that this module can plant (groups of 32 neighbours,
8-byte loads) are those that ran fast and gave wrong text.

Knows no page, no device, no vLLM; ``reference`` is the arithmetic that it is compared with.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from kernels_patch.layout import QMAX

LANES = 64
SIDE = 16  # rows of A, columns of B
DEPTH = 32  # elements that one instruction sums
LANE_ELEMENTS = 8
WAVE_TOKENS = 64
LOAD_BYTES = 16

Grouping = Literal["fragment", "neighbours"]


def list_lane_tokens(instruction: int, lane: int) -> np.ndarray:
    """The 8 tokens of a wave (0 to 63) that ``lane`` feeds to ``instruction`` (0 or 1)."""
    first = (lane // SIDE) * LOAD_BYTES + instruction * LANE_ELEMENTS
    return np.arange(first, first + LANE_ELEMENTS)


def list_owned_tokens(instruction: int) -> np.ndarray:
    """The 32 tokens of a wave that ``instruction`` sums, ascending."""
    return np.unique([list_lane_tokens(instruction, lane) for lane in range(LANES)])


def assign_groups(grouping: Grouping) -> np.ndarray:
    """int [64]: whose scale each token's weight is rounded with, instruction 0's or 1's.

    ``fragment`` follows the instruction that consumes the token; ``neighbours`` is the bug.
    """
    token = np.arange(WAVE_TOKENS)
    if grouping == "neighbours":
        return token // DEPTH
    return token % LOAD_BYTES // LANE_ELEMENTS


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One instruction: a and b int8 [64 lanes, 8] to sums int32 [64 lanes, 4].

    Lane l's sum i is that of row 4 * i + l // 16 and column l % 16.
    """
    lane = np.arange(LANES)
    sums = np.zeros((LANES, 4), dtype=np.int32)
    for i in range(4):
        row = 4 * i + lane // SIDE
        for s in range(LANES // SIDE):
            held_a = a[s * SIDE + row].astype(np.int32)
            held_b = b[s * SIDE + lane % SIDE].astype(np.int32)
            sums[:, i] += (held_a * held_b).sum(axis=1)
    return sums


def gather_sums(sums: np.ndarray) -> np.ndarray:
    """Sums int32 [64 lanes, 4] of ``multiply`` as a matrix [16 rows, 16 columns]."""
    matrix = np.empty((SIDE, SIDE), dtype=sums.dtype)
    lane = np.arange(LANES)
    for i in range(4):
        matrix[4 * i + lane // SIDE, lane % SIDE] = sums[:, i]
    return matrix


def load_v(v: np.ndarray, load_bytes: int = LOAD_BYTES) -> np.ndarray:
    """V int8 [64 tokens, 16 dimensions] as each lane fetches it, int8 [64 lanes, 16].

    A load of 8 bytes leaves the second half of a lane's register as it was: zero here.
    """
    held = np.zeros((LANES, LOAD_BYTES), dtype=np.int8)
    for lane in range(LANES):
        first = (lane // SIDE) * LOAD_BYTES
        held[lane, :load_bytes] = v[first : first + load_bytes, lane % SIDE]
    return held


def weigh_wave(
    p: np.ndarray,
    v: np.ndarray,
    v_scale: np.ndarray,
    grouping: Grouping = "fragment",
    load_bytes: int = LOAD_BYTES,
) -> np.ndarray:
    """P [16, 64] times V int8 [64, 16] with scales [64], as a wave does it: float64 [16, 16].

    W = P * v_scale is rounded with its group's scale, and an instruction's sums are multiplied by
    the scale of that instruction.
    """
    w = p * v_scale
    group = assign_groups(grouping)
    scale = np.stack([np.abs(w[:, group == g]).max(axis=1) for g in (0, 1)], axis=1) / QMAX
    divisor = np.where(scale == 0, 1, scale)[:, group]
    rounded = np.rint(w / divisor).astype(np.int8)  # at most 127: the scale is of the same group
    held_v = load_v(v, load_bytes)
    out = np.zeros((SIDE, SIDE))
    for instruction in (0, 1):
        tokens = np.stack([list_lane_tokens(instruction, lane) for lane in range(LANES)])
        a = rounded[np.arange(LANES)[:, None] % SIDE, tokens]
        half = slice(instruction * LANE_ELEMENTS, (instruction + 1) * LANE_ELEMENTS)
        sums = gather_sums(multiply(a, held_v[:, half]))
        out += sums * scale[:, instruction, None]
    return out


def weigh(
    p: np.ndarray,
    v: np.ndarray,
    v_scale: np.ndarray,
    grouping: Grouping = "fragment",
    load_bytes: int = LOAD_BYTES,
) -> np.ndarray:
    """P [16, S] times V int8 [S, D] with scales [S], wave by wave: float64 [16, D].

    S is a multiple of 64 and D one of 16.
    """
    out = np.zeros((SIDE, v.shape[1]))
    for token in range(0, v.shape[0], WAVE_TOKENS):
        t = slice(token, token + WAVE_TOKENS)
        for dim in range(0, v.shape[1], SIDE):
            d = slice(dim, dim + SIDE)
            out[:, d] += weigh_wave(p[:, t], v[t, d], v_scale[t], grouping, load_bytes)
    return out
