"""Rows of 8-bit numbers with a scale each: what rounding costs, and products of them."""

import pytest
import torch

from minserve.kernels.fp8 import (
    FP8,
    FP8_MAX,
    fp8_linear,
    fp8_linear_cuda,
    fp8_linear_reference,
    quantize_rows,
    quantize_rows_reference,
    quantize_rows_triton,
)

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 300])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_rows(rows, size, device="cpu", dtype=torch.float32):
    """Rows of very different sizes; within each, numbers of very different sizes."""
    x = torch.randn(rows, size) * torch.rand(rows, size) ** 4 * 10.0 ** torch.randint(-4, 4, (rows, 1))
    return x.to(device, dtype)


def dequantized(x8, scale):
    return x8.double() * scale.double()[:, None]


# Quantizing


@SIZES
def test_rounding_costs_at_most_a_sixteenth_or_a_thousandth_of_the_scale(size, device, dtype):
    x = random_rows(7, size, device, dtype)
    x8, scale = quantize_rows(x)
    assert (x8.dtype, scale.dtype) == (FP8, torch.float32)
    error = (dequantized(x8, scale) - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, scale.double()[:, None] / 1024) * 1.00001).all()


@SIZES
def test_the_largest_number_of_a_row_becomes_the_largest_of_the_format(size, device, dtype):
    x8, scale = quantize_rows(random_rows(7, size, device, dtype))
    assert (x8.float().abs().amax(1) == FP8_MAX).all()
    assert (scale > 0).all()


def test_a_row_of_zeros_stays_one(device, dtype):
    x8, scale = quantize_rows(torch.zeros(2, 16, device=device, dtype=dtype))
    assert (x8.float() == 0).all()
    assert (scale > 0).all()
    assert scale.isfinite().all()


def test_a_row_does_not_depend_on_its_neighbours(device, dtype):
    x = random_rows(5, 64, device, dtype)
    whole, alone = quantize_rows(x), quantize_rows(x[2:3])
    assert torch.equal(whole[0][2:3].float(), alone[0].float())
    assert torch.equal(whole[1][2:3], alone[1])


@SIZES
@pytest.mark.parametrize("rows", [1, 5])
def test_the_kernel_scales_as_the_reference(rows, size, device, dtype):
    """Without the rounding, which Triton's interpreter cannot do."""
    x = random_rows(rows, size, device, dtype)
    scaled, scale = quantize_rows_triton(x, dtype=torch.float32)
    expected_scale = quantize_rows_reference(x)[1]
    assert torch.equal(scale, expected_scale)
    torch.testing.assert_close(scaled, x.float() / expected_scale[:, None], rtol=1e-6, atol=0)


@gpu
@needs_cuda
@pytest.mark.parametrize("size", [16, 33, 4096, 12288, 28672])
def test_the_kernel_rounds_as_the_reference_bit_by_bit(size, device, dtype):
    x = random_rows(65, size, device, dtype)
    x[3] = 0
    x8, scale = quantize_rows_triton(x)
    expected, expected_scale = quantize_rows_reference(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(x8.view(torch.uint8), expected.view(torch.uint8))


@gpu
@needs_cuda
def test_rows_behind_2_to_the_31_numbers(device):
    x = torch.zeros(2**19 + 2, 4096, device=device, dtype=torch.bfloat16)
    x[-2:] = random_rows(2, 4096, device, torch.bfloat16)
    x8, scale = quantize_rows(x)
    expected, expected_scale = quantize_rows_reference(x[-2:])
    assert torch.equal(scale[-2:], expected_scale)
    assert torch.equal(x8[-2:].float(), expected.float())


# Multiplying


def operands(rows, num_in, num_out, device, dtype):
    weight, weight_scale = quantize_rows(random_rows(num_out, num_in, device))
    return random_rows(rows, num_in, device, dtype), weight, weight_scale, torch.randn(num_out).to(device, dtype)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_reference_is_the_product_of_what_the_numbers_stand_for(rows, with_bias):
    x, weight, weight_scale, bias = operands(rows, 48, 32, "cpu", torch.float32)
    exact = dequantized(*quantize_rows(x)) @ dequantized(weight, weight_scale).T
    exact += bias.double() if with_bias else 0
    out = fp8_linear(x, weight, weight_scale, bias if with_bias else None)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_product_is_a_few_percent_off_that_of_the_plain_numbers(dtype):
    x, plain = torch.randn(9, 256).to(dtype), torch.randn(64, 256)
    out = fp8_linear(x, *quantize_rows(plain))
    exact = x.double() @ plain.double().T
    assert out.dtype == dtype
    assert (out.double() - exact).norm() / exact.norm() < 0.05


@gpu
@needs_cuda
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 64, 300])
@pytest.mark.parametrize(("num_in", "num_out"), [(32, 16), (576, 960), (4096, 6144), (12288, 4096)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tensor_cores_multiply_as_the_reference(rows, num_in, num_out, with_bias, device, dtype):
    """But for bfloat16's last bits, and the sums': the tensor cores add up in 14 bits (arXiv 2412.19437, 3.3.2)."""
    x, weight, weight_scale, bias = operands(rows, num_in, num_out, device, dtype)
    bias = bias if with_bias else None
    out = fp8_linear_cuda(x, weight, weight_scale, bias)
    exact = fp8_linear_reference(x.double(), weight, weight_scale, bias.double() if with_bias else None)
    error = (out.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert out.dtype == dtype
    assert error.max() < 0.04


@gpu
@needs_cuda
def test_it_is_captured_in_a_graph(device):
    x, weight, weight_scale, bias = operands(4, 64, 32, device, torch.bfloat16)
    expected = fp8_linear(x, weight, weight_scale, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_linear(x, weight, weight_scale, bias)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
