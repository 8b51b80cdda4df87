"""Norm, RoPE and the store of k and v: the reference and the kernel against the formulas, step by step in float64."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.keep_queries import Keep, keep_queries
from minserve.kernels.norm_rope_store import norm_rope_store, norm_rope_store_reference, norm_rope_store_triton
from minserve.kernels.rope import gather_rope

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3.2e-2}
"""A norm whose rounding falls to the other side of a tie is off by a unit in the last place: 2^-5 for values over 4."""

EPS = 1e-5
RUNS = pytest.mark.parametrize("run", [norm_rope_store_reference, norm_rope_store_triton])


class Case:
    """Random inputs, and what has to come of them."""

    def __init__(self, device, dtype, *, tokens, heads, kv_heads, head_dim, normed=True, pages=4):
        def random(*shape):
            return torch.randn(*shape, device=device)

        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = (random(tokens, heads + 2 * kv_heads, head_dim) * 2).to(dtype)
        self.norms = (random(head_dim).to(dtype), random(head_dim).to(dtype)) if normed else None
        # Angles that no two tokens share, so that a row of the wrong token shows.
        self.angles = torch.rand(tokens, head_dim // 2, device=device, dtype=torch.float64) * 6
        table = torch.stack((self.angles.cos(), self.angles.sin()), dim=1).float()
        self.rope = gather_rope(table, torch.arange(tokens, device=device))
        self.kv = torch.full((pages, kv_heads, 2, BLOCK_SIZE, head_dim), torch.nan, device=device, dtype=dtype)
        self.places = torch.randperm(pages * BLOCK_SIZE, device=device)[:tokens]

    def arguments(self):
        return self.qkv, self.norms, EPS, self.rope, self.kv, self.places

    def expected(self):
        """q, k and v as they have to be: [tokens, their heads, head_dim] float64."""
        q, k, v = self.qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norms is not None:
            q, k = self._normed(q, self.norms[0]), self._normed(k, self.norms[1])
        return self._turned(q), self._turned(k), v.double()

    def _normed(self, x, weight):
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        return exact.to(x.dtype)

    def _turned(self, x):
        """Pair i of a head is (x[i], x[i + half]), a complex number that is multiplied by exp(angle * 1j)."""
        pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.exp(1j * self.angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), dim=-1)


def assert_near(actual, exact, dtype):
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def assert_stored(case, k, v, dtype):
    """k and v are at the tokens' places, and every other place is as it was."""
    pages, slots = case.places // BLOCK_SIZE, case.places % BLOCK_SIZE
    assert_near(case.kv[pages, :, 0, slots], k, dtype)
    assert torch.equal(case.kv[pages, :, 1, slots].double(), v)
    untouched = case.kv.clone()
    untouched[pages, :, :, slots] = torch.nan
    assert untouched.isnan().all()


@RUNS
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 64), (9, 3, 64), (4, 1, 128), (16, 2, 128), (10, 10, 8), (2, 1, 48)]
)
def test_q_is_returned_and_k_and_v_are_stored(run, heads, kv_heads, head_dim, normed, device, dtype):
    case = Case(device, dtype, tokens=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim, normed=normed)
    before = case.qkv.clone()
    q = run(*case.arguments())
    exact_q, k, v = case.expected()
    assert q.shape == (2, heads, head_dim)
    assert q.is_contiguous()
    assert_near(q, exact_q, dtype)
    assert_stored(case, k, v, dtype)
    assert torch.equal(case.qkv, before)


@RUNS
@pytest.mark.parametrize("tokens", [1, 17])
def test_any_number_of_tokens_goes_to_any_places(run, tokens, device, dtype):
    case = Case(device, dtype, tokens=tokens, heads=2, kv_heads=1, head_dim=16)
    q, k, v = case.expected()
    assert_near(run(*case.arguments()), q, dtype)
    assert_stored(case, k, v, dtype)


@RUNS
def test_q_is_written_where_the_caller_wants_it(run, device, dtype):
    case = Case(device, dtype, tokens=5, heads=4, kv_heads=2, head_dim=16)
    out = torch.full((5, 4, 16), torch.nan, device=device, dtype=dtype)
    assert run(*case.arguments(), out) is out
    assert_near(out, case.expected()[0], dtype)


@RUNS
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 2, 128), (10, 10, 8), (2, 1, 48)])
def test_the_queries_that_are_wanted_are_kept_as_they_are_returned(run, heads, kv_heads, head_dim, rows, device, dtype):
    case = Case(device, dtype, tokens=4 * rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    lanes, ahead = torch.tensor([[4, -1, 0, 6], [rows - 1, 0, 0, rows // 2]], device=device)
    kept = torch.full((7, 2, heads, head_dim), torch.nan, device=device, dtype=dtype)
    expected = kept.clone()
    q = run(*case.arguments(), None, Keep(ahead, lanes, kept))
    assert_near(q, case.expected()[0], dtype)
    keep_queries(q, Keep(ahead, lanes, expected))
    torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)


@RUNS
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_nothing_is_stored_for_padding_and_its_neighbours_do_not_notice(run, normed, device, dtype):
    case = Case(device, dtype, tokens=5, heads=3, kv_heads=1, head_dim=64, normed=normed)
    case.places[1], case.places[4] = -1, -1
    case.qkv[4] = 0
    q = run(*case.arguments())
    real = case.places >= 0
    exact_q, k, v = case.expected()
    assert_near(q[real], exact_q[real], dtype)
    assert q.isfinite().all()
    case.places = case.places[real]
    assert_stored(case, k[real], v[real], dtype)


def test_tensors_that_do_not_fit_each_other_are_our_mistake(device):
    case = Case(device, torch.float32, tokens=2, heads=2, kv_heads=1, head_dim=8)
    qkv, norms, eps, rope, kv, places = case.arguments()
    for wrong in (
        (qkv[:, :2], norms, eps, rope, kv, places),
        (qkv.half(), norms, eps, rope, kv, places),
        (qkv, norms, eps, (rope[0], rope[1][:, 0]), kv, places),
        (qkv, norms, eps, rope, kv[..., :4], places),
        (qkv, norms, eps, rope, kv, places.int()),
        (qkv, norms, eps, rope, kv, places[:1]),
    ):
        with pytest.raises(AssertionError):
            norm_rope_store(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_place_past_two_billion_elements_is_found(device):
    case = Case(device, torch.bfloat16, tokens=1, heads=32, kv_heads=8, head_dim=128)
    pages = 2**31 // case.kv[0].numel() + 2
    case.kv = torch.empty(pages, *case.kv.shape[1:], device=device, dtype=torch.bfloat16)
    case.places.fill_((pages - 1) * BLOCK_SIZE + 7)
    norm_rope_store(*case.arguments())
    _, k, v = case.expected()
    assert_near(case.kv[-1, :, 0, 7], k[0], torch.bfloat16)
    assert torch.equal(case.kv[-1, :, 1, 7].double(), v[0])
