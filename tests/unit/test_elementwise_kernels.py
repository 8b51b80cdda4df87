"""The torch references of the small kernels against their formulas, computed in float64."""

import pytest
import torch

from minserve.kernels.linear import linear
from minserve.kernels.rms_norm import add_rms_norm, rms_norm
from minserve.kernels.rope import apply_rope, gather_rope
from minserve.kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def assert_rounded_once(actual, exact, dtype):
    """The result has the dtype and is within one rounding of the exact one."""
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def rms_norm_by_formula(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (5, 3, 128)])
def test_rms_norm(dtype, shape):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert_rounded_once(rms_norm(x, weight, 1e-5), rms_norm_by_formula(x, weight, 1e-5), dtype)


def test_rms_norm_of_nearly_nothing_is_bounded_by_eps():
    x = torch.full((1, 8), 1e-6)
    assert_rounded_once(rms_norm(x, torch.ones(8), 1e-2), torch.full((1, 8), 1e-5, dtype=torch.float64), torch.float32)


@DTYPES
def test_add_rms_norm_normalizes_the_sum_and_returns_it(dtype):
    x, residual = torch.randn(2, 6, 64).to(dtype)
    x_before, residual_before, weight = x.clone(), residual.clone(), torch.randn(64).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert_rounded_once(total, x.double() + residual.double(), dtype)
    assert_rounded_once(normed, rms_norm_by_formula(total, weight, 1e-5), dtype)
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


@DTYPES
def test_silu_mul_takes_the_gate_first(dtype):
    gate, up = torch.randn(2, 5, 24).to(dtype)
    gate_up = torch.cat((gate, up), dim=-1)
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    before = gate_up.clone()
    torch.testing.assert_close(silu_mul(gate_up).double(), exact, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    assert torch.equal(gate_up, before)


@DTYPES
def test_rope_turns_each_pair_by_its_angle(dtype):
    """Pair i of a head is (x[i], x[i + half]), a complex number that is multiplied by exp(angle * 1j)."""
    positions, half = torch.tensor([0, 3, 1, 31]), 8
    angles = torch.arange(32, dtype=torch.float64)[:, None] / 100 ** (torch.arange(half) / half)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    x = torch.randn(4, 3, 2 * half).to(dtype)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.exp(1j * angles[positions])[:, None]
    actual = apply_rope(x, *gather_rope(table, positions))
    assert_rounded_once(actual, torch.cat((turned.real, turned.imag), dim=-1), dtype)
    assert torch.equal(actual[0], x[0]), "position 0 does not turn"


def test_rope_takes_views_with_gaps():
    """q and k are slices of one projection's output."""
    whole = torch.randn(4, 5, 16)
    cos, sin = gather_rope(torch.randn(8, 2, 8), torch.arange(4))
    assert torch.equal(apply_rope(whole[:, 1:3], cos, sin), apply_rope(whole[:, 1:3].contiguous(), cos, sin))


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_the_product_with_the_transposed_weight_plus_the_bias(rows, with_bias):
    x, weight, bias = torch.randn(rows, 48), torch.randn(33, 48), torch.randn(33) if with_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    out = linear(x, weight, bias)
    assert out.shape == (rows, 33)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
