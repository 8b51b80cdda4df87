"""Products of few rows by Triton, against the formula in float64."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from minserve.kernels.linear import (
    Choice,
    Tile,
    choose_tile,
    linear,
    linear_reference,
    linear_silu_mul,
    linear_silu_mul_reference,
    linear_silu_mul_triton,
    linear_triton,
)

VECTOR = Tile(block_n=16, block_k=64, num_warps=2, num_stages=2, tensor_cores=False)
DOT = Tile(block_n=16, block_k=64, num_warps=2, num_stages=3)
WIDE = Tile(block_n=64, block_k=32, num_warps=4, num_stages=2)
SPLIT = DOT._replace(splits=3)
BOTH = pytest.mark.parametrize("tile", [VECTOR, DOT], ids=["vector", "dot"])
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WITH_BIAS = pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
SIZE_IN = 192


@contextmanager
def uninitialized_is_nan():
    """What a kernel allocates and does not write is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_inputs(rows, size_out, device, dtype, size_in=SIZE_IN, with_bias=False):
    """x, weight, bias, such that the results are near 1."""
    torch.manual_seed(0)
    x = torch.randn(rows, size_in, device=device).to(dtype)
    weight = (torch.randn(size_out, size_in, device=device) / size_in**0.5).to(dtype)
    return x, weight, torch.randn(size_out, device=device).to(dtype) if with_bias else None


def exact_linear(x, weight, bias):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def exact_silu_mul(x, weight, bias):
    gate, up = exact_linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def assert_rounded_once(actual, exact, dtype):
    """The sums are float32's; only the result is rounded to the dtype."""
    assert (actual.dtype, actual.shape) == (dtype, exact.shape)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(actual.double(), exact, atol=1e-5, rtol=tolerance)


def test_uninitialized_is_nan():
    with uninitialized_is_nan():
        assert torch.zeros(3).new_empty(2, 3).isnan().all()


@pytest.mark.parametrize(
    ("rows", "size_out", "tile"),
    [
        *[(1, size_out, VECTOR) for size_out in (1, 15, 16, 33)],
        *[(rows, 33, DOT) for rows in (1, 2, 15, 16, 17, 33)],
        *[(3, size_out, DOT) for size_out in (1, 15, 16)],
        (5, 65, WIDE),
        *[(rows, 33, SPLIT) for rows in (1, 17)],
    ],
)
@WITH_BIAS
def test_linear(rows, size_out, tile, with_bias, device, dtype):
    inputs = random_inputs(rows, size_out, device, dtype, with_bias=with_bias)
    with uninitialized_is_nan():
        actual = linear_triton(*inputs, tile)
    assert_rounded_once(actual, exact_linear(*inputs), dtype)


@pytest.mark.parametrize(
    ("rows", "size", "tile"),
    [
        *[(1, size, VECTOR) for size in (1, 7, 8, 19)],
        *[(rows, 19, DOT) for rows in (1, 16, 17)],
        *[(2, size, DOT) for size in (1, 7, 8)],
        (5, 33, WIDE),
    ],
)
@WITH_BIAS
def test_linear_silu_mul(rows, size, tile, with_bias, device, dtype):
    inputs = random_inputs(rows, 2 * size, device, dtype, with_bias=with_bias)
    with uninitialized_is_nan():
        actual = linear_silu_mul_triton(*inputs, tile)
    assert_rounded_once(actual, exact_silu_mul(*inputs), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter: infinity is right
@BOTH
def test_gates_far_from_zero(tile, device, dtype):
    """exp overflows for a gate below -88: the result is 0 times up, and never NaN."""
    weight = torch.zeros(6, SIZE_IN, device=device, dtype=dtype)
    x = torch.zeros(1, SIZE_IN, device=device, dtype=dtype)
    x[0, 0] = 1.0
    weight[:, 0] = torch.tensor([-1000.0, 0.0, 1000.0, 2.0, 2.0, 2.0])
    torch.testing.assert_close(
        linear_silu_mul_triton(x, weight, None, tile).float().cpu(), torch.tensor([[0.0, 0.0, 2000.0]])
    )


@BOTH
def test_in_of_one_piece(tile, device, dtype):
    inputs = random_inputs(1, 5, device, dtype, size_in=tile.block_k)
    assert_rounded_once(linear_triton(*inputs, tile), exact_linear(*inputs), dtype)


@pytest.mark.parametrize("tile", [DOT, SPLIT], ids=["dot", "split"])
def test_a_row_does_not_depend_on_the_others(tile, device, dtype):
    x, weight, _ = random_inputs(5, 17, device, dtype)
    alone = linear_triton(x[2:3].contiguous(), weight, None, tile)
    x[[0, 1, 3, 4]] = torch.nan
    assert linear_triton(x, weight, None, tile)[2].equal(alone[0])


@pytest.mark.parametrize(("op", "by_torch"), [(linear, linear_reference), (linear_silu_mul, linear_silu_mul_reference)])
@pytest.mark.parametrize("rows", [1, 3])
@WITH_BIAS
def test_on_a_cpu_the_reference_serves(op, by_torch, rows, with_bias):
    inputs = random_inputs(rows, 6, torch.device("cpu"), torch.float32, with_bias=with_bias)
    exact = exact_linear(*inputs) if op is linear else exact_silu_mul(*inputs)
    assert op(*inputs).equal(by_torch(*inputs))
    assert_rounded_once(op(*inputs), exact, torch.float32)


def test_the_first_choice_that_fits_is_taken():
    choices = (Choice(1, 100, VECTOR), Choice(16, 100, SPLIT), Choice(16, 1000, DOT))
    assert choose_tile(choices, rows=1, size_in=192, size_out=100) == VECTOR
    assert choose_tile(choices, rows=2, size_in=192, size_out=100) == SPLIT
    assert choose_tile(choices, rows=2, size_in=64, size_out=100) == DOT  # no three parts of 64
    assert choose_tile(choices, rows=1, size_in=192, size_out=101) == DOT
    assert choose_tile(choices, rows=17, size_in=192, size_out=100) is None
    assert choose_tile(choices, rows=1, size_in=96, size_out=100) is None
    assert choose_tile((), rows=1, size_in=192, size_out=100) is None


@pytest.mark.parametrize(
    ("rows", "size_in", "tile"),
    [(2, 192, VECTOR), (65, 192, DOT), (1, 96, DOT), (1, 64, SPLIT), (1, 192, VECTOR._replace(splits=3))],
)
def test_what_a_tile_cannot_do_is_refused(rows, size_in, tile, device):
    inputs = random_inputs(rows, 16, device, torch.float32, size_in=size_in)
    with pytest.raises(AssertionError):
        linear_triton(*inputs, tile)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    ("rows", "tile"), [(1, VECTOR._replace(ahead=2)), (5, DOT._replace(ahead=1)), (5, SPLIT._replace(ahead=1))]
)
def test_kernels_that_start_early_wait_for_their_input(rows, tile):
    """A long chain, each kernel reading what the one before wrote, eager and captured."""
    cuda = torch.device("cuda")
    x, weight, _ = random_inputs(rows, SIZE_IN * 16, cuda, torch.bfloat16, size_in=SIZE_IN * 16)

    def chain(multiply):
        y = x
        for _ in range(50):
            y = F.layer_norm(multiply(multiply(y)), weight.shape[:1])
        return y

    expected = chain(lambda y: linear_triton(y, weight, None, tile._replace(ahead=0)))
    assert chain(lambda y: linear_triton(y, weight, None, tile)).equal(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda y: linear_triton(y, weight, None, tile))
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert captured.equal(expected)


@pytest.mark.gpu
@NEEDS_GPU
@BOTH
def test_weights_of_more_than_2_31_elements(tile):
    cuda = torch.device("cuda")
    size_in = 4096
    weight = torch.zeros(2**31 // size_in + 40, size_in, device=cuda, dtype=torch.bfloat16)
    x, weight[-20:], _ = random_inputs(1, 20, cuda, torch.bfloat16, size_in=size_in)
    actual = linear_triton(x, weight, None, tile)
    assert_rounded_once(actual[:, -20:], exact_linear(x, weight[-20:], None), torch.bfloat16)
    assert not actual[:, :-20].any()
