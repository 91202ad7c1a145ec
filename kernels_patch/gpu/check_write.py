"""Correctness of the cache write, with and without RoPE, against the reference.

Pages are built here in NumPy, byte by byte from ``layout.UnitLayout``. Free slots hold payload -128
and scale NaN, and must still hold them afterwards. Nothing here needs a GPU: the tests run these
cases under Triton's interpreter too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels_patch import reference
from kernels_patch.gpu.layout import UnitLayout
from kernels_patch.gpu.producer import int8_write
from kernels_patch.gpu.rope import int8_rope_write
from kernels_patch.gpu.tuning import ProducerTuning

SPARE_PAGES = 3


@dataclass(frozen=True)
class WriteCase:
    """One cache write; ``slots`` is aligned, shifted, scattered or holey (some tokens skipped)."""

    name: str
    n_tokens: int
    slots: str = "aligned"
    kv_heads: int = 4
    head_dim: int = 256
    block_size: int = 64
    data: str = "random"
    dtype: torch.dtype = torch.bfloat16
    tuning: ProducerTuning | None = None

    @property
    def layout(self) -> UnitLayout:
        return UnitLayout(self.block_size, self.head_dim)

    @property
    def n_pages(self) -> int:
        return -(-self.n_tokens // self.block_size) + SPARE_PAGES

    def place_tokens(self, rng: np.random.Generator) -> np.ndarray:
        """int64 [n_tokens]: the slot of each token, -1 for one that is skipped."""
        start = self.block_size + (5 if self.slots == "shifted" else 0)
        slots = np.arange(start, start + self.n_tokens)
        if self.slots == "scattered":
            slots = rng.permutation(self.n_pages * self.block_size)[: self.n_tokens]
        if self.slots == "holey":
            slots[::3] = -1
        return slots


@dataclass(frozen=True)
class RopeCase(WriteCase):
    """The write behind a rotation of ``rotary_dim`` dimensions (0: all); ``padding`` more tokens
    are rotated and have no slot."""

    heads: int = 24
    is_neox: bool = True
    rotary_dim: int = 0
    angle_dtype: torch.dtype = torch.bfloat16
    padding: int = 0


def write_cases() -> Iterator[WriteCase]:
    for n_tokens in (1, 2, 15, 16, 17, 100, 2242):
        for slots in ("aligned", "shifted", "scattered", "holey"):
            yield WriteCase(f"{n_tokens} {slots}", n_tokens, slots)
    for kv_heads, head_dim in ((8, 128), (3, 64)):
        yield WriteCase(f"{kv_heads}/{head_dim}", 100, "shifted", kv_heads, head_dim)
    for block_size in (16, 784):
        yield WriteCase(f"page {block_size}", 1000, block_size=block_size)
    for data in ("outlier", "zeros"):
        yield WriteCase(data, 100, data=data)
    for tuning in (None, ProducerTuning(8, 4)):
        yield WriteCase(f"one NaN element {tuning}", 20, data="nan", tuning=tuning)
    yield WriteCase("float16", 100, dtype=torch.float16)
    for tuning in (ProducerTuning(4, 2), ProducerTuning(16, 4), ProducerTuning(16, 4, split=True)):
        yield WriteCase(str(tuning), 100, "holey", tuning=tuning)


def rope_cases() -> Iterator[RopeCase]:
    half, single = torch.float16, torch.float32
    for is_neox in (True, False):
        style = "halves" if is_neox else "neighbours"
        base = RopeCase("", 17, "holey", is_neox=is_neox)
        for n_tokens in (1, 2):
            yield replace(base, name=f"{style} {n_tokens}", n_tokens=n_tokens, slots="aligned")
        yield replace(base, name=f"{style} 17 holey")
        yield replace(base, name=f"{style} 2242 holey", n_tokens=2242)
        yield replace(base, name=f"{style} padding", slots="aligned", padding=5)
        yield replace(base, name=f"{style} float16", dtype=half, angle_dtype=half)
        yield replace(base, name=f"{style} float32 angles", angle_dtype=single)
        for rotary_dim in (64, 16):
            yield replace(base, name=f"{style} {rotary_dim} of 256", rotary_dim=rotary_dim)
        for shape in ((32, 8, 128), (9, 3, 64)):
            heads, kv_heads, head_dim = shape
            yield replace(
                base, name=f"{style} {shape}", slots="shifted",
                heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            )  # fmt: skip
        for tuning in (ProducerTuning(8, 4), ProducerTuning(16, 4)):
            yield replace(base, name=f"{style} {tuning}", tuning=tuning, padding=3)
        yield replace(base, name=f"{style} one NaN element", slots="aligned", data="nan")


def write_differences(case: WriteCase, device: str = "cuda", seed: int = 0) -> int:
    """How many bytes of the pages differ from the reference's, those not to be written included."""
    rng = np.random.default_rng(seed)
    slots = case.place_tokens(rng)
    # Keys and values as slices of one projection's output: tokens are not contiguous.
    packed = floats(rng, (case.n_tokens, 3 * case.kv_heads, case.head_dim), case.data)
    packed = torch.from_numpy(packed).to(device, case.dtype)
    key, value = packed[:, : case.kv_heads], packed[:, case.kv_heads : 2 * case.kv_heads]
    pages = torch.from_numpy(poisoned_pages(case.n_pages, case.kv_heads, case.layout)).to(device)
    int8_write(key, value, pages, torch.from_numpy(slots).to(device), case.tuning)
    return _page_differences(case, slots, key, value, pages)


def rope_differences(case: RopeCase, device: str = "cuda", seed: int = 0) -> int:
    """How many rotated elements are not the exact rotation, rounded once, and how many bytes of the
    pages are not those of the rotated keys; a launch that was not counted, or wrongly, is one more.
    """
    rng = np.random.default_rng(seed)
    slots = case.place_tokens(rng)
    n_tokens = case.n_tokens + case.padding
    sizes = [case.heads, case.kv_heads, case.kv_heads]
    packed = floats(rng, (n_tokens, sum(sizes), case.head_dim), case.data)
    packed = torch.from_numpy(packed).to(device, case.dtype)
    before = packed.double().cpu().numpy()
    angles = rng.uniform(-np.pi, np.pi, (300, (case.rotary_dim or case.head_dim) // 2))
    cos_sin = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))
    cos_sin = cos_sin.to(device, case.angle_dtype)
    positions = torch.from_numpy(rng.integers(0, len(angles), n_tokens)).to(device)
    pages = torch.from_numpy(poisoned_pages(case.n_pages, case.kv_heads, case.layout)).to(device)
    ticks = torch.full((1,), 41, dtype=torch.int64, device=device)
    query, key, value = packed.split(sizes, dim=1)
    int8_rope_write(
        query, key, value, positions, cos_sin, case.is_neox, pages,
        torch.from_numpy(slots).to(device), ticks, case.tuning,
    )  # fmt: skip
    rotated = case.heads + case.kv_heads
    exact, slack = _rotation(before[:, :rotated], cos_sin[positions], case.is_neox, case.dtype)
    wrong = _unequal(packed[:, :rotated], exact, slack) + _unequal(value, before[:, rotated:], 0)
    wrong += ticks.item() != 41 + (slots[0] >= 0)
    return wrong + _page_differences(case, slots, key, value, pages)


def _rotation(
    x: np.ndarray, cos_sin: torch.Tensor, is_neox: bool, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """float64 x [T, H, D] rotated by cos_sin [T, R], and how far the rotation in float32, rounded
    once to ``dtype``, may lie from that: half a unit of its last place, and float32's own."""
    half = cos_sin.shape[1] // 2
    cos, sin = np.split(cos_sin.double().cpu().numpy()[:, None], 2, axis=-1)
    first, second = slice(0, half), slice(half, 2 * half)
    if not is_neox:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    exact, slack = x.copy(), np.zeros_like(x)
    a, b = x[..., first], x[..., second]
    exact[..., first], exact[..., second] = a * cos - b * sin, b * cos + a * sin
    info = torch.finfo(dtype)
    for part, size in (
        (first, np.abs(a * cos) + np.abs(b * sin)),
        (second, np.abs(b * cos) + np.abs(a * sin)),
    ):
        slack[..., part] = info.eps / 2 * (np.abs(exact[..., part]) + info.tiny) + 2.0**-22 * size
    return exact, slack


def _unequal(got: torch.Tensor, want: np.ndarray, slack: np.ndarray | float) -> int:
    """How many elements differ by more than ``slack``; NaN is equal to NaN only."""
    found = got.double().cpu().numpy()
    with np.errstate(invalid="ignore"):
        same = (np.abs(found - want) <= slack) | (np.isnan(found) & np.isnan(want))
    return int((~same).sum())


def _page_differences(
    case: WriteCase, slots: np.ndarray, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor
) -> int:
    """Bytes of ``pages`` that differ from the reference's over the tokens that have a slot.

    A vector that holds a NaN has scale NaN, whatever its bits, and no payload to speak of.
    """
    layout = case.layout
    want = poisoned_pages(case.n_pages, case.kv_heads, layout)
    written = np.zeros((case.n_pages, 1, case.block_size), bool)
    with np.errstate(invalid="ignore"):
        parts = (
            *reference.quantise(key.float().cpu().numpy()),
            *reference.quantise(value.float().cpu().numpy()),
        )
    for token, slot in enumerate(slots):
        if slot >= 0:
            page, at = divmod(slot, case.block_size)
            written[page, 0, at] = True
            place(want, layout, np.array([page]), *(part[token : token + 1] for part in parts), at)
    flat = (case.n_pages, case.kv_heads, layout.page_bytes)
    want, got = want.reshape(flat), pages.cpu().numpy().reshape(flat)
    same = got == want
    for index, scale_index in (
        (layout.k_index, layout.k_scale_index),
        (layout.v_index, layout.v_scale_index),
    ):
        scale_bytes = scale_index[:, None] + np.arange(4)
        scales = [np.ascontiguousarray(x[:, :, scale_bytes]).view(np.float32) for x in (got, want)]
        lost = written & np.isnan(scales).all(axis=0)[..., 0]
        same[:, :, scale_bytes] |= lost[..., None]
        same[:, :, index] |= lost[..., None]
    return int((~same).sum())


def poisoned_pages(n_pages: int, kv_heads: int, layout: UnitLayout) -> np.ndarray:
    """int8 [n_pages, kv_heads, block_size, 2 D + 8]: payload -128, scales NaN."""
    cache = np.full((n_pages, kv_heads, layout.page_bytes), -128, np.int8)
    nan = np.frombuffer(np.float32(np.nan).tobytes(), np.int8)
    for index in (layout.k_scale_index, layout.v_scale_index):
        cache[:, :, index[:, None] + np.arange(4)] = nan
    return cache.reshape(n_pages, kv_heads, layout.block_size, layout.bytes_per_token)


def place(
    cache: np.ndarray,
    layout: UnitLayout,
    table: np.ndarray,
    k: np.ndarray,
    k_scale: np.ndarray,
    v: np.ndarray,
    v_scale: np.ndarray,
    first: int = 0,
) -> None:
    """Put payloads [S, Hkv, D] and float32 scales [S, Hkv] of one request into its pages.

    ``first`` is the offset of the first token in the first page.
    """
    for start in range(0, first + len(k), layout.block_size):
        pages = cache[table[start // layout.block_size]].reshape(k.shape[1], layout.page_bytes)
        part = slice(max(0, start - first), start - first + layout.block_size)
        n = len(k[part])
        at = slice(max(0, first - start), max(0, first - start) + n)
        for head, page in enumerate(pages):
            page[layout.k_index[at]] = k[part, head]
            page[layout.v_index[at]] = v[part, head]
            for index, scale in ((layout.k_scale_index, k_scale), (layout.v_scale_index, v_scale)):
                bytes_ = np.ascontiguousarray(scale[part, head]).view(np.int8).reshape(n, 4)
                page[index[at, None] + np.arange(4)] = bytes_


def floats(rng: np.random.Generator, shape: tuple[int, ...], data: str) -> np.ndarray:
    x = rng.standard_normal(shape).astype(np.float32)
    if data == "outlier":  # a few channels 30 times the others, as keys have them
        x[..., :: shape[-1] // 4] *= 30
    if data == "zeros":  # whole vectors of zeros: amax 0
        x[rng.random(shape[:-1]) < 0.5] = 0
    if data == "nan":  # one element of every third vector
        x.reshape(-1, shape[-1])[::3, 5] = np.nan
    return x
