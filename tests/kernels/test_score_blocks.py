"""What query heads expect to find in blocks, by the extremes of keys, against loops over lists."""

import random

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import build_digests, empty_digests, extremes_shape
from minserve.kernels.fp8 import FP8
from minserve.kernels.score_blocks import MOST, score_blocks, score_blocks_reference, score_blocks_triton

from .working_sets import by_head, expected_logit, slow

INF = float("inf")


def score_by_reference(*case):
    return by_head(score_blocks_reference(*case))


def score_by_triton(*case, **options):
    return by_head(score_blocks_triton(*case, **options))


BOTH = pytest.mark.parametrize("score", [score_by_reference, score_by_triton])
WIDE_OR_NOT = pytest.mark.parametrize("in_8_bits", [False, True], ids=["wide", "fp8"])


def random_case(seed, device, dtype, in_8_bits=False, *, kv_heads=2, group=3, head_dim=4, num_blocks=9):
    """Integers, few of them."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    queries = torch.randint(-3, 4, (4, 2, kv_heads * group, head_dim)).to(device, dtype)
    extremes = torch.randint(-3, 4, (12, *extremes_shape(kv_heads, head_dim))).sort(dim=2).values
    extremes = extremes.float().to(device, FP8 if in_8_bits else dtype)
    table = torch.randint(-1, 12, (5, num_blocks), dtype=torch.int32, device=device)
    lanes = torch.tensor([chance.choice([lane, lane, -1]) for lane in (4, 0, 3, 1)], device=device)
    end = torch.tensor([chance.choice([0, 1, 2, num_blocks // 2, num_blocks, num_blocks + 3]) for _ in lanes])
    return queries, extremes, table, lanes, end.to(device)


def off(dtype):
    """By how much a logit of such a case may be off: weights are rounded, to float16 or to two parts of E4M3."""
    return {"rtol": 1e-6, "atol": 1e-5 if dtype == torch.float32 else 0.04}


def expected(queries, extremes, table, lanes, end):
    queries, extremes, table = queries.tolist(), extremes.float().tolist(), table.tolist()
    group = len(queries[0][0]) // len(extremes[0])
    logits = []
    for entry, (lane, last) in enumerate(zip(lanes.tolist(), end.tolist())):
        for row in range(2):
            for head, q in enumerate(queries[entry][row]):
                for block, place in enumerate(table[lane]):
                    is_ranked = lane >= 0 and 1 <= block < last and place >= 0
                    logits.append(expected_logit(q, extremes[place][head // group]) if is_ranked else -INF)
    return torch.tensor(logits)


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 4), (2, 3, 8), (3, 4, 4), (1, 8, 12)])
def test_every_head_has_a_logit_for_ranked_blocks_and_no_others(
    score, in_8_bits, seed, kv_heads, group, head_dim, device, dtype
):
    case = random_case(seed, device, dtype, in_8_bits, kv_heads=kv_heads, group=group, head_dim=head_dim)
    logits = score(*case)
    assert (logits.shape, logits.dtype.itemsize) == ((4, 2, kv_heads * group, 9), dtype.itemsize)
    torch.testing.assert_close(logits.flatten().float().cpu(), expected(*case), **off(dtype))


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize(
    ("num_blocks", "kv_heads", "group", "head_dim"), [(33, 2, 3, 64), (97, 1, 8, 128), (32, 3, 1, 96)]
)
def test_logits_of_any_number_of_blocks_are_those_in_higher_precision(
    score, in_8_bits, num_blocks, kv_heads, group, head_dim, device, dtype
):
    torch.manual_seed(num_blocks)
    queries = torch.randn(2, 2, kv_heads * group, head_dim, device=device).to(dtype)
    extremes = torch.randn(num_blocks, *extremes_shape(kv_heads, head_dim), device=device).sort(dim=2).values.to(FP8)
    extremes = extremes if in_8_bits else extremes.to(dtype)
    table = torch.stack([torch.randperm(num_blocks, dtype=torch.int32) for _ in range(2)]).to(device)
    lanes, end = torch.tensor([1, 0], device=device), torch.tensor([num_blocks, num_blocks - 2], device=device)
    found = score(queries, extremes, table, lanes, end).double()
    for entry, lane in enumerate(lanes.tolist()):
        # [rows, kv_heads, group, blocks, slow coordinates]
        q = queries[entry].double()[..., slow(head_dim)].view(2, kv_heads, group, 1, -1)
        least, most = extremes.double()[table[lane].long()].transpose(0, 1)[None, :, None].unbind(dim=-2)
        logits = (q * (least + most) / 2 + 0.7 * q.abs() * (most - least) / 2).sum(dim=-1) / head_dim**0.5
        logits = logits.flatten(1, 2)
        ranked = slice(1, end[entry].item())
        # Weights are rounded to the queries' dtype: sums of head_dim errors of 2^-9 each, of products of about 1.
        error = 1e-4 if dtype == torch.float32 else 0.02
        assert torch.allclose(found[entry][..., ranked], logits[..., ranked], rtol=0, atol=error)


@BOTH
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_expected_of_a_block_lies_seven_tenths_of_the_way_from_its_middle_to_its_bound(score, head_dim, device):
    """Keys are numbers of E4M3, so that extremes bound them exactly."""
    kv = torch.randn(6, 2, 2, BLOCK_SIZE, head_dim, device=device).to(FP8).float()
    digests = empty_digests((6,), 2, head_dim, torch.float32, device)
    queries, places = torch.randn(1, 2, 6, head_dim, device=device), torch.arange(6, device=device)
    build_digests(kv, digests, places, places)
    lanes, end = torch.tensor([0], device=device), torch.tensor([6], device=device)
    logits = score(queries, digests.extremes.float(), places[None].int(), lanes, end)[0].view(2, 2, 3, 6)
    keys = kv[:, :, 0][..., slow(head_dim)]  # [blocks, kv_heads, 16, head_dim / 2]
    q = queries[0, ..., slow(head_dim)].view(2, 2, 3, 1, head_dim // 2) / head_dim**0.5
    least, most = (extreme.transpose(0, 1)[:, None] for extreme in (keys.amin(2), keys.amax(2)))
    bound, middle = torch.maximum(q * least, q * most).sum(-1), (q * (least + most) / 2).sum(-1)
    products = torch.einsum("rhgd,bhtd->rhgbt", q[..., 0, :], keys)
    assert bool((bound >= products.amax(dim=-1) - 1e-4).all())
    expected = middle + 0.7 * (bound - middle)
    torch.testing.assert_close(logits[..., 1:], expected[..., 1:], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@BOTH
def test_what_is_no_number_is_ranked_last_but_ranked(score, device):
    queries = torch.ones(1, 2, 1, 4, device=device)
    extremes = torch.zeros(6, 1, 2, 2, device=device)
    extremes[2] = torch.nan
    extremes[3] = -INF
    extremes[4] = INF
    extremes[5, :, 1, 0] = torch.nan  # one of them
    table = torch.tensor([[0, 2, 1, 3, 4, 5]], dtype=torch.int32, device=device)
    logits = score(queries, extremes, table, torch.tensor([0], device=device), torch.tensor([6], device=device))
    assert logits[0, 0, 0].tolist() == [-INF, -MOST, 0.0, -MOST, MOST, -MOST]


@BOTH
def test_the_first_columns_of_a_wide_table_are_enough(score, device):
    queries, extremes, table, lanes, _ = random_case(3, device, torch.float32)
    end = torch.full_like(lanes, 5)
    narrow = score(queries, extremes, table[:, :5], lanes, end)
    torch.testing.assert_close(narrow, score(queries, extremes, table, lanes, end)[..., :5], **off(torch.float32))


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("num_blocks", [97, 160])
def test_however_many_programs_share_the_blocks_the_logits_are_the_same(splits, num_blocks, device, dtype):
    queries, extremes, table, lanes, _ = random_case(5, device, dtype, num_blocks=num_blocks)
    lanes[:3] = torch.tensor([4, 0, 3], device=device)
    end = torch.tensor([num_blocks, 33, 80, 0], device=device)
    found = score_by_triton(queries, extremes, table, lanes, end, splits=splits)
    assert torch.equal(found, score_by_triton(queries, extremes, table, lanes, end, splits=3))
    torch.testing.assert_close(found, score_by_reference(queries, extremes, table, lanes, end), **off(dtype))


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 4, 128), (3, 3, 64), (1, 8, 96)])
def test_weights_in_two_parts_of_8_bits_are_as_good_as_in_16(kv_heads, group, head_dim, device):
    """Each weight is off by 2^-8 of itself at most, and signs are random. So is what float16 takes off a logit."""
    torch.manual_seed(head_dim)
    num_blocks = 150
    queries = torch.randn(2, 2, kv_heads * group, head_dim, device=device)
    queries = (queries * torch.randn(head_dim, device=device).exp()).half()  # as they are: some coordinates are large
    extremes = torch.randn(num_blocks, *extremes_shape(kv_heads, head_dim), device=device).sort(dim=2).values.to(FP8)
    table = torch.stack([torch.randperm(num_blocks, dtype=torch.int32) for _ in range(2)]).to(device)
    table[:, 7] = -1
    lanes, end = torch.tensor([1, 0], device=device), torch.tensor([num_blocks, num_blocks - 30], device=device)
    found = score_by_triton(queries, extremes, table, lanes, end)
    expected = score_by_reference(queries.float(), extremes, table, lanes, end)
    assert (found.dtype, expected.dtype) == (torch.float16, torch.float32)
    ranked = expected > -INF
    assert torch.equal(found > -INF, ranked)
    squares = torch.einsum("erhd,bhd->erhb", *(x.float().square() for x in of_heads(queries, extremes, head_dim)))
    rms = (squares.mean() / head_dim).sqrt() * 2**-8 + expected[ranked].square().mean().sqrt() * 2**-11
    assert (found.float() - expected)[ranked].square().mean().sqrt() < rms


def of_heads(queries, extremes, head_dim):
    """Queries' slow coordinates, and for each query head the root of the mean of both extremes' squares."""
    extremes = extremes.float().square().mean(dim=2).sqrt()
    group = queries.shape[2] // extremes.shape[1]
    return queries[..., slow(head_dim)], extremes.repeat_interleave(group, dim=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter knows no NaN of 8 bits")
def test_what_is_no_number_in_8_bits_is_ranked_last_but_ranked(device):
    queries = torch.ones(1, 2, 1, 4, dtype=torch.float16, device=device)
    extremes = torch.zeros(4, 1, 2, 2, device=device)
    extremes[2] = torch.nan
    extremes[3, :, 1, 0] = torch.nan  # one of them
    table, lanes = torch.arange(4, dtype=torch.int32, device=device)[None], torch.tensor([0], device=device)
    logits = score_by_triton(queries, extremes.to(FP8), table, lanes, torch.tensor([4], device=device))
    assert logits[0, 0, 0].tolist() == [-INF, 0.0, -MOST, -MOST]


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    queries, extremes, table, lanes, end = random_case(0, device, torch.float32)
    for wrong in (
        (torch.cat((queries, queries[:, :1]), dim=1), extremes, table, lanes, end),
        (queries[:, :, :3].contiguous(), extremes, table, lanes, end),
        (queries[..., :2].contiguous(), extremes, table, lanes, end),
        (queries, extremes[:, :, :1].contiguous(), table, lanes, end),
        (queries, extremes.flatten(1, 2), table, lanes, end),
        (queries, extremes, table.long(), lanes, end),
        (queries, extremes, table, lanes[:2], end),
    ):
        with pytest.raises(AssertionError):
            score_blocks(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_extremes_past_two_billion_elements_are_found(device):
    kv_heads, head_dim = 8, 128
    num_places = 2**31 // (kv_heads * 2 * head_dim) + 2
    extremes = torch.empty(num_places, *extremes_shape(kv_heads, head_dim), dtype=FP8, device=device)
    extremes[-1].copy_(torch.ones((), device=device))
    queries = torch.ones(1, 2, 4 * kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[0, num_places - 1]], dtype=torch.int32, device=device)
    logits = score_blocks(queries, extremes, table, torch.tensor([0], device=device), torch.tensor([2], device=device))
    expected = head_dim // 2 / head_dim**0.5
    found = logits[:, :, :, 1]
    torch.testing.assert_close(found, torch.full_like(found, expected), rtol=0, atol=0.02)
