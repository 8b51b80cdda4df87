"""Blocks in 8-bit floating point: what rounding costs, and that it costs once."""

import pytest
import torch

from minserve.kernels.fp8 import FP8
from minserve.kernels.fp8_blocks import dequantize_blocks, quantize_blocks

from .working_sets import blocks_of_text

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def random_blocks(device, dtype, head_dim=64, least=-3):
    """[blocks, layers, kv_heads, 2, 16, head_dim]: sides of very different sizes, from 10^least on; numbers too."""
    blocks = blocks_of_text(4, 3, 2, device=device, dtype=torch.float32, head_dim=head_dim)
    sizes = 10.0 ** torch.randint(least, 3, (*blocks.shape[:4], 1, 1), device=device)
    return (blocks * torch.rand_like(blocks) ** 4 * sizes).to(dtype)


@DTYPES
@pytest.mark.parametrize("head_dim", [4, 64, 96, 128])
def test_there_and_back_costs_a_sixteenth_or_a_thousandth_of_the_scale(dtype, head_dim, device):
    blocks = random_blocks(device, dtype, head_dim)
    blocks8, scales = quantize_blocks(blocks)
    assert (blocks8.dtype, blocks8.shape) == (FP8, blocks.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, blocks.shape[:4])
    back = dequantize_blocks(blocks8, scales, dtype)
    assert back.dtype == dtype
    error = (back.double() - blocks.double()).abs()
    own = torch.finfo(dtype).eps / 2 * back.double().abs() + torch.finfo(dtype).smallest_normal * 2**-7
    bound = torch.maximum(blocks.double().abs() / 16, scales.double()[..., None, None] / 1024) * 1.00001
    assert (error <= bound + own).all()


@DTYPES
def test_keys_and_values_of_a_head_have_scales_of_their_own(dtype, device):
    blocks = random_blocks(device, dtype)
    scales = quantize_blocks(blocks)[1]
    torch.testing.assert_close(scales * 448, blocks.abs().amax(dim=(4, 5)).float(), rtol=1e-6, atol=0)
    other = blocks.clone()
    other[2, 1, 0, 1] *= 0.125
    changed = quantize_blocks(other)[1] != scales
    assert changed.nonzero().tolist() == [[2, 1, 0, 1]]


@DTYPES
def test_what_was_rounded_once_is_rounded_no_further(dtype, device):
    """Above float16's own smallest numbers."""
    first = quantize_blocks(random_blocks(device, dtype, least=1))
    second = quantize_blocks(dequantize_blocks(*first, dtype))
    assert torch.equal(second[0].view(torch.uint8), first[0].view(torch.uint8))
    torch.testing.assert_close(second[1], first[1], rtol=1e-6, atol=0)


@DTYPES
def test_nothing_stays_nothing_and_the_largest_number_stays_finite(dtype, device):
    blocks = torch.zeros(2, 1, 1, 2, 16, 8, device=device, dtype=dtype)
    blocks[1, 0, 0, 1, 3, 5] = largest = torch.finfo(dtype).max
    back = dequantize_blocks(*quantize_blocks(blocks), dtype)
    assert not back[0].any()
    assert back.isfinite().all()
    assert back[1, 0, 0, 1, 3, 5].item() == pytest.approx(largest, rel=1e-6)
