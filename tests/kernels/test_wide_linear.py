"""Products of many rows by equal shares, against the formula in float64."""

import pytest
import torch

from minserve.kernels.linear import linear_silu_mul_triton, linear_triton
from minserve.kernels.linear_tiles import Tile
from tests.kernels.test_linear import (
    NEEDS_GPU,
    WITH_BIAS,
    assert_rounded_once,
    exact_linear,
    exact_silu_mul,
    random_inputs,
    uninitialized_is_nan,
)

TILE = Tile(block_n=64, block_k=32, num_warps=4, num_stages=3, block_m=48, programs=7)
OPS = pytest.mark.parametrize(
    ("op", "exact"), [(linear_triton, exact_linear), (linear_silu_mul_triton, exact_silu_mul)], ids=["", "silu_mul"]
)


@pytest.mark.parametrize(
    ("rows", "size_out", "block_m", "programs"),
    [
        (65, 144, 80, 7),  # three tiles of six pieces: shares of three
        (65, 144, 80, 5),  # of four: tiles of two programs, programs of two tiles
        (65, 144, 80, 2),  # of nine: one program has a whole tile, another is shared
        (65, 144, 80, 3),  # of six: no parts
        (65, 144, 80, 132),  # more programs than pieces
        (79, 144, 64, 7),  # three programs for each of two tiles of rows
        (80, 144, 80, 7),
        (81, 144, 80, 1),  # more tiles of rows than programs
        (130, 16, 128, 4),
        (5, 80, 16, 4),
    ],
)
@OPS
@WITH_BIAS
def test_wide_linear(rows, size_out, block_m, programs, op, exact, with_bias, device, dtype):
    inputs = random_inputs(rows, size_out, device, dtype, with_bias=with_bias)
    with uninitialized_is_nan():
        actual = op(*inputs, TILE._replace(block_m=block_m, programs=programs))
    assert_rounded_once(actual, exact(*inputs), dtype)


@OPS
def test_any_number_of_outputs(op, exact, device, dtype):
    inputs = random_inputs(65, 166, device, dtype, with_bias=True)
    assert_rounded_once(op(*inputs, TILE), exact(*inputs), dtype)


def test_a_row_does_not_depend_on_the_others(device, dtype):
    x, weight, _ = random_inputs(66, 144, device, dtype)
    tile = TILE._replace(block_m=80)
    alone = linear_triton(x[65:].contiguous(), weight, None, tile)
    x[:65] = torch.nan
    assert linear_triton(x, weight, None, tile)[65].equal(alone[0])


@pytest.mark.parametrize(
    "tile", [TILE._replace(block_m=44), TILE._replace(block_m=112), TILE._replace(splits=2), TILE._replace(block_k=128)]
)
def test_what_a_tile_cannot_do_is_refused(tile, device):
    with pytest.raises(AssertionError):
        linear_triton(*random_inputs(65, 16, device, torch.float32), tile)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("rows", [230, 270, 512])
@pytest.mark.parametrize("block_m", [192, 256, 272])
@OPS
def test_sizes_and_tiles_of_production(rows, block_m, op, exact):
    cuda = torch.device("cuda")
    inputs = random_inputs(rows, 6144, cuda, torch.bfloat16, size_in=4096)
    expected = exact(*inputs)
    for ahead in (0, 1):
        tile = Tile(128, 64, 8, 4, block_m=block_m, ahead=ahead)
        actual = op(*inputs, tile)
        # Tensor cores cut what does not fit a sum, and 4096 products are many.
        torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=2**-8)
        assert all(op(*inputs, tile).equal(actual) for _ in range(20))


@pytest.mark.gpu
@NEEDS_GPU
def test_weights_of_more_than_2_31_elements():
    cuda = torch.device("cuda")
    size_in = 4096
    weight = torch.zeros(2**31 // size_in + 40, size_in, device=cuda, dtype=torch.bfloat16)
    x, weight[-20:], _ = random_inputs(65, 20, cuda, torch.bfloat16, size_in=size_in)
    actual = linear_triton(x, weight, None, Tile(128, 64, 8, 4, block_m=128))
    assert_rounded_once(actual[:, -20:], exact_linear(x, weight[-20:], None), torch.bfloat16)
    assert not actual[:, :-20].any()
