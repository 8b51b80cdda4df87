"""RMS norm, alone and behind a residual addition: the reference and the kernel against the formula in float64."""

import pytest
import torch

from minserve.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""One rounding: half a unit in the last place is 2^-9 of a bfloat16."""

SHAPES = [(1, 1), (3, 64), (15, 33), (2, 576), (1, 4096), (2, 5120), (2, 3, 128)]


def formula(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def assert_rounded_once(actual, exact, dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("run", [rms_norm_reference, rms_norm_triton])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_is_divided_by_its_root_mean_square_and_weighted(run, shape, device, dtype):
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    weight = torch.randn(shape[-1], device=device).to(dtype)
    before = x.clone()
    assert_rounded_once(run(x, weight, 1e-5), formula(x, weight, 1e-5), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("run", [rms_norm_reference, rms_norm_triton])
def test_eps_bounds_what_a_row_of_nearly_nothing_becomes(run, device, dtype):
    x, weight = torch.full((2, 48), 1e-6, device=device, dtype=dtype), torch.ones(48, device=device, dtype=dtype)
    assert_rounded_once(run(x, weight, 1e-2), formula(x, weight, 1e-2), dtype)
    assert not run(torch.zeros_like(x), weight, 1e-2).any()


@pytest.mark.parametrize("run", [add_rms_norm_reference, add_rms_norm_triton])
@pytest.mark.parametrize("shape", [(1, 64), (17, 33), (2, 576), (1, 4096)], ids=str)
def test_the_sum_is_rounded_first_and_what_is_normalized_is_the_rounded_sum(run, shape, device, dtype):
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    weight = torch.randn(shape[-1], device=device).to(dtype)
    x_before, exact_sum = x.clone(), (x + residual).clone()
    normed, total = run(x, residual, weight, 1e-5)
    assert torch.equal(total, exact_sum)
    assert_rounded_once(normed, formula(exact_sum, weight, 1e-5), dtype)
    assert torch.equal(x, x_before)


def test_the_kernel_takes_no_memory_for_the_sum(device):
    x, residual = torch.randn(2, 3, 64, device=device)
    assert add_rms_norm_triton(x, residual, torch.ones(64, device=device), 1e-5)[1] is residual


def test_tensors_that_do_not_fit_each_other_are_our_mistake(device):
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(AssertionError):
        rms_norm(x, weight[:4], 1e-5)
    with pytest.raises(AssertionError):
        rms_norm(x, weight.half(), 1e-5)
    with pytest.raises(AssertionError):
        add_rms_norm(x, x[:1], weight, 1e-5)
    with pytest.raises(AssertionError):
        rms_norm_triton(x.T.contiguous().T, weight, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_past_two_billion_elements_are_found(device):
    rows, size = 2**31 // 4096 + 3, 4096
    x = torch.empty(rows, size, device=device, dtype=torch.bfloat16)
    x[-1] = torch.randn(size, device=device)
    weight = torch.ones(size, device=device, dtype=torch.bfloat16)
    assert_rounded_once(rms_norm(x, weight, 1e-5)[-1], formula(x[-1], weight, 1e-5), torch.bfloat16)
