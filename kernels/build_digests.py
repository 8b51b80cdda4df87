"""Summaries of full blocks, by which blocks are ranked without looking at their keys, in two looks.

By the extremes, for the first look (after Quest, arXiv 2406.10774), of each slow coordinate d of a block's 16 keys:

    least_d, most_d = min, max over tokens t of key_td        rounded to E4M3, the 8-bit floating point of 4 bits of
                                                              exponent and 3 of mantissa, up to its largest, 448
By levels, for a second look at those blocks that are the best by extremes (score_keys.py): what a query finds in a
block is mostly in one of its keys, of which extremes do not tell where each stands. A level is the nearest of 4:

    level_td = how many of 1, 3 and 5 sixths of (most_d - least_d) lie below key_td - least_d
    key_td  ~= least_d + (most_d - least_d) level_td / 3

slow: the half of the coordinates that RoPE turns slowest. The others turn far enough within a few tokens that their
extremes say little more than how large they are. tools/NOTES.md, "What the ranking misses", has what is found by less
and by more. Both together take 3 of 64 bytes of what the block itself does in 16 bits: extremes 1, levels 2.

The keys are those after RoPE, as they stand in pages. Neither can be undone for one token: a block is summarized when
it is full and all of its tokens are accepted.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minserve.config import BLOCK_SIZE
from minserve.kernels.fp8 import CAPABILITY, FP8, FP8_MAX
from minserve.kernels.lang import tl, triton
from minserve.kernels.masked_write import write_where

PAGES_AT_ONCE = 64
"""On a CPU, so that their keys stay in caches."""

LEVELS = 4
"""Of a coordinate of a key, between the least and the greatest of its block: 2 bits."""


class Digests(NamedTuple):
    """Of blocks, one layer's or those of several.

    extremes: [places, kv_heads, 2 (min, max), slow coordinates], numbers of E4M3
    keys: [places, kv_heads, 16 (tokens), slow coordinates / 4, rounded up] uint8, levels: those of coordinates i,
        i + n, i + 2 n and i + 3 n are in byte i, n being as many as there are bytes, from the lowest bits up; what is
        behind the last coordinate is 0
    """

    extremes: torch.Tensor
    keys: torch.Tensor

    def check(self, kv_heads: int, head_dim: int) -> None:
        assert self.extremes.shape[1:] == extremes_shape(kv_heads, head_dim), (self.extremes.shape, kv_heads, head_dim)
        assert self.keys.shape == (len(self.extremes), *digest_shapes(kv_heads, head_dim)[1]), self.keys.shape
        assert self.keys.dtype == torch.uint8, self.keys.dtype
        assert all(table.is_contiguous() for table in self)

    def view_all(self) -> "Digests":
        """Of [layers, places, ...] each, those of one layer behind those of the layer before."""
        return Digests(*(table.flatten(0, 1) for table in self))


def extremes_shape(kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Of one block: [kv_heads, 2 (min, max), slow coordinates]."""
    return kv_heads, 2, head_dim // 2


def digest_shapes(kv_heads: int, head_dim: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Of one block, of extremes and of keys."""
    return extremes_shape(kv_heads, head_dim), (kv_heads, BLOCK_SIZE, -(-head_dim // 8))


def empty_digests(
    places: tuple[int, ...], kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Digests:
    """For [*places] blocks, of pages of this dtype."""
    shapes, dtypes = digest_shapes(kv_heads, head_dim), (digest_dtype(device, dtype), torch.uint8)
    empty = (torch.empty(*places, *shape, dtype=own, device=device) for shape, own in zip(shapes, dtypes, strict=True))
    return Digests(*empty)


def digest_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """dtype: of pages, in which the rounded numbers are kept where 8 bits would be no help: on a CPU, which turns them
    into float32, and on GPUs before the first that know E4M3."""
    is_here = device.type == "cuda" and torch.cuda.is_available()
    is_old = is_here and torch.cuda.get_device_capability(device) < CAPABILITY
    return dtype if is_old or device.type == "cpu" else FP8


def slow_coordinates(x: torch.Tensor) -> torch.Tensor:
    """[..., head_dim / 2] of [..., head_dim], where RoPE turns coordinates i and i + head_dim / 2 together, the more
    slowly the greater i."""
    quarter = x.shape[-1] // 4
    return x.view(*x.shape[:-1], 2, 2, quarter)[..., 1, :].flatten(-2)


def build_digests(kv: torch.Tensor, digests: Digests, pages: torch.Tensor, places: torch.Tensor) -> None:
    """Writes the digests of some pages to their places.

    kv: [pages, kv_heads, 2 (K, V), 16, head_dim], one layer's; head_dim is a multiple of 4
    digests: one layer's; extremes are float8_e4m3fn or wider
    pages, places: [n] int64, no place twice; place -1: nothing is read or written. All contiguous.
    """
    _, kv_heads, sides, _, head_dim = kv.shape
    assert (sides, head_dim % 4) == (2, 0), kv.shape
    digests.check(kv_heads, head_dim)
    assert pages.shape == places.shape == (len(pages),), (pages.shape, places.shape)
    assert pages.dtype == places.dtype == torch.int64, (pages.dtype, places.dtype)
    assert all(tensor.is_contiguous() for tensor in (kv, pages, places))
    run = build_digests_triton if kv.is_cuda else build_digests_reference
    run(kv, digests, pages, places)


def build_digests_reference(kv: torch.Tensor, digests: Digests, pages: torch.Tensor, places: torch.Tensor) -> None:
    for page, place in zip(pages.split(PAGES_AT_ONCE), places.split(PAGES_AT_ONCE), strict=True):
        valid = place >= 0
        keys = slow_coordinates(kv[torch.where(valid, page, 0), :, 0]).to(torch.float32).contiguous()
        extremes = torch.stack((keys.amin(dim=2), keys.amax(dim=2)), dim=2).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        least, most = extremes.to(torch.float32).unsqueeze(2).unbind(3)
        above, span = keys.sub_(least).mul_(6), most - least
        levels = (above > span).to(torch.uint8)
        for odd in (3, 5):
            levels += above > span * odd
        write_where(digests.extremes, place, extremes.to(digests.extremes.dtype), valid)
        write_where(digests.keys, place, pack_levels(levels), valid)


def pack_levels(levels: torch.Tensor) -> torch.Tensor:
    """[..., slow coordinates] uint8, as bytes of `Digests`."""
    first, second, third, fourth = F.pad(levels, (0, -levels.shape[-1] % 4)).unflatten(-1, (4, -1)).unbind(-2)
    packed: torch.Tensor = first | second << 2 | third << 4 | fourth << 6
    return packed


@triton.jit
def slow_column(number, head_dim: tl.constexpr) -> Any:
    """Where the slow coordinate of that number stands, as `slow_coordinates` has them."""
    return number + head_dim // 4 + number // (head_dim // 4) * (head_dim // 4)


@triton.jit
def _round_to_e4m3(x, largest: tl.constexpr):
    """float32, to the nearest number of E4M3, of two as near to the even one: by arithmetic, so that wider dtypes hold
    the same. Triton's interpreter rounds otherwise."""
    x = tl.minimum(tl.maximum(x, -largest), largest)
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits of mantissa are left
    # Below 2^-6 numbers are 2^-9 apart, as float32 are between 2^14 and 2^15.
    return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _build_digests_kernel(
    kv, extremes, levels, pages, places, largest: tl.constexpr, kv_heads: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program for one KV head of one page, a quarter of the slow coordinates at a time: the lowest bits of all
    bytes, then the next. size: bytes of a token's levels; width: the same, rounded up to a power of two."""
    number = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    place = tl.load(places + number)
    if place >= 0:
        page = tl.load(pages + number)
        half: tl.constexpr = head_dim // 2
        token = tl.arange(0, block_size)[:, None]
        byte = tl.arange(0, width)
        source = kv + (page * kv_heads + head) * (2 * block_size * head_dim) + token * head_dim
        target = extremes + (place * kv_heads + head) * (2 * half)
        packed = tl.zeros([block_size, width], tl.int32)
        for quarter in tl.static_range(4):
            column = quarter * size + byte
            known = (byte < size) & (column < half)
            key = tl.load(source + slow_column(column, head_dim)[None, :], mask=known[None, :], other=0.0)
            key = key.to(tl.float32)
            least, most = _round_to_e4m3(tl.min(key, 0), largest), _round_to_e4m3(tl.max(key, 0), largest)
            tl.store(target + column, least.to(extremes.dtype.element_ty), mask=known)
            tl.store(target + half + column, most.to(extremes.dtype.element_ty), mask=known)
            above, span = (key - least[None, :]) * 6, (most - least)[None, :]
            level = (above > span).to(tl.int32) + (above > span * 3).to(tl.int32) + (above > span * 5).to(tl.int32)
            packed |= level << 2 * quarter
        target = levels + (place * kv_heads + head) * (block_size * size) + token * size + byte[None, :]
        tl.store(target, packed.to(tl.uint8), mask=(byte < size)[None, :])


def build_digests_triton(kv: torch.Tensor, digests: Digests, pages: torch.Tensor, places: torch.Tensor) -> None:
    _, kv_heads, _, block_size, head_dim = kv.shape
    size = digests.keys.shape[-1]
    _build_digests_kernel[(len(pages) * kv_heads,)](
        kv, *digests, pages, places, FP8_MAX, kv_heads, block_size, head_dim, size, triton.next_power_of_2(size),
        num_warps=1,
    )  # fmt: skip
