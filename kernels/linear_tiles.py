"""How the Triton kernels of linear.py and wide_linear.py cut a product, and how a table says which cut is used."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """How the Triton path cuts a product. `in` has to be a multiple of block_k * splits.

    block_n: rows of W that a program reads; block_k: how much of `in` at a time. Both are powers of two.
    num_stages: how many pieces [block_n, block_k] of W are in flight.
    tensor_cores: multiply with tl.dot, x padded to 16 rows; else multiply and add, for one row only.
    splits: programs that share an output, each with its part of `in`; a second kernel adds the parts up, in order.
    ahead: above 0, the kernel starts while the one before it still runs, and asks for so many pieces of W until that
    one has ended (programmatic dependent launch, Hopper and later). Right behind any kernel; of most use if that one
    lets its successor start early too.

    block_m: above 0, the product is wide_linear.py's: rows of x that a program multiplies with, a power of two from 16
    on or the sum of two; programs: how many there are. They share all work equally, so `splits` is 1, and `ahead` is of
    their second kernel alone.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tensor_cores: bool = True
    splits: int = 1
    ahead: int = 0
    block_m: int = 0
    programs: int = 132


class Choice(NamedTuple):
    """A tile for so many rows, up to so many outputs, and inputs of at least so many."""

    max_rows: int
    max_out: int
    tile: Tile
    min_in: int = 0
    min_rows: int = 1


def choose_tile(choices: tuple[Choice, ...], rows: int, size_in: int, size_out: int) -> Tile | None:
    """The tile to multiply [rows, in] with on the GPU; None where torch should."""
    for choice in choices:
        fits = size_in >= choice.min_in and size_in % (choice.tile.block_k * choice.tile.splits) == 0
        if choice.min_rows <= rows <= choice.max_rows and size_out <= choice.max_out and fits:
            return choice.tile
    return None


def check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert x.dim() == 2, x.shape
    assert weight.dim() == 2, weight.shape
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()
    assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype and bias.is_contiguous())
