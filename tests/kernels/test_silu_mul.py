"""silu(gate) * up: the reference and the kernel against the formula in float64."""

import pytest
import torch

from minserve.kernels.silu_mul import WIDTH, silu_mul, silu_mul_reference, silu_mul_triton

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3}
"""Two roundings: of silu(gate), and of the product."""


def formula(gate, up):
    return gate.double() / (1 + (-gate.double()).exp()) * up.double()


@pytest.mark.parametrize("run", [silu_mul_reference, silu_mul_triton])
@pytest.mark.parametrize("size", [1, 15, 33, 1536, WIDTH, 2 * WIDTH + 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_gate_comes_first(run, rows, size, device, dtype):
    gate, up = (torch.randn(2, rows, size, device=device) * 4).to(dtype)
    gate_up = torch.cat((gate, up), dim=-1)
    before = gate_up.clone()
    out = run(gate_up)
    assert out.dtype == dtype
    assert out.shape == (rows, size)
    torch.testing.assert_close(out.double(), formula(gate, up), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(gate_up, before)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # to infinity, as it should
@pytest.mark.parametrize("run", [silu_mul_reference, silu_mul_triton])
def test_large_gates_neither_overflow_nor_vanish(run, device, dtype):
    gate = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]], device=device).to(dtype)
    out = run(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    torch.testing.assert_close(out, gate.clamp_min(0))


def test_a_tensor_of_odd_width_or_with_gaps_is_our_mistake(device):
    with pytest.raises(AssertionError):
        silu_mul(torch.zeros(2, 7, device=device))
    with pytest.raises(AssertionError):
        silu_mul(torch.zeros(2, 8, device=device)[:, :6])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_past_two_billion_elements_are_found(device):
    size = 12288
    gate_up = torch.empty(2**31 // (2 * size) + 3, 2 * size, device=device, dtype=torch.bfloat16)
    gate_up[-1] = torch.randn(2 * size, device=device)
    exact = formula(*gate_up[-1].chunk(2))
    torch.testing.assert_close(silu_mul(gate_up)[-1].double(), exact, atol=8e-3, rtol=8e-3)
