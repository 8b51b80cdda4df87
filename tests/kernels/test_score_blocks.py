"""Scores of blocks by their digests, and which are wanted, against loops over lists."""

import random

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import build_digests
from minserve.kernels.score_blocks import (
    score_blocks,
    score_blocks_reference,
    score_blocks_triton,
    top_scores,
    wanted_blocks,
    wanted_blocks_reference,
    wanted_blocks_triton,
)

from .working_sets import first_wanted

INF = float("inf")
BOTH_SCORE = pytest.mark.parametrize("score", [score_blocks_reference, score_blocks_triton])
BOTH_WANT = pytest.mark.parametrize("want", [wanted_blocks_reference, wanted_blocks_triton])


def random_case(seed, device, dtype, *, kv_heads=2, group=3, head_dim=4, num_blocks=9):
    """Integers, few of them: sums are exact, and many scores are equal."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    queries = torch.randint(-3, 4, (4, 2, kv_heads * group, head_dim)).to(device, dtype)
    digests = torch.randint(-3, 4, (12, kv_heads, 2, head_dim)).sort(dim=2).values.to(device, dtype)
    table = torch.randint(-1, 12, (5, num_blocks), dtype=torch.int32, device=device)
    lanes = torch.tensor([chance.choice([lane, lane, -1]) for lane in (4, 0, 3, 1)], device=device)
    end = torch.tensor([chance.choice([0, 1, 2, num_blocks // 2, num_blocks, num_blocks + 3]) for _ in lanes])
    return queries, digests, table, lanes, end.to(device)


def expected(queries, digests, table, lanes, end):
    queries, digests, table = (each.tolist() for each in (queries, digests, table))
    kv_heads, group = len(digests[0]), len(queries[0][0]) // len(digests[0])
    scores = []
    for entry, (lane, last) in enumerate(zip(lanes.tolist(), end.tolist())):
        for row in range(2):
            for head in range(kv_heads):
                for block, place in enumerate(table[lane]):
                    if lane < 0 or block == 0 or block >= last or place < 0:
                        scores.append(-INF)
                        continue
                    least, most = digests[place][head]
                    heads = queries[entry][row][head * group : (head + 1) * group]
                    scores.append(sum(max(x * a, x * b) for q in heads for x, a, b in zip(q, least, most)))
    return scores


@BOTH_SCORE
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 4), (1, 8)])
def test_a_score_is_the_sum_of_bounds_and_only_ranked_blocks_have_one(score, seed, kv_heads, group, device, dtype):
    case = random_case(seed, device, dtype, kv_heads=kv_heads, group=group)
    scores = score(*case)
    assert scores.shape == (4, 2, kv_heads, 9)
    assert scores.flatten().tolist() == expected(*case)


@BOTH_SCORE
@pytest.mark.parametrize(
    ("num_blocks", "kv_heads", "group", "head_dim"), [(33, 2, 3, 64), (97, 1, 8, 128), (32, 3, 1, 96)]
)
def test_scores_of_any_number_of_blocks_are_those_in_higher_precision(
    score, num_blocks, kv_heads, group, head_dim, device, dtype
):
    torch.manual_seed(num_blocks)
    queries = torch.randn(2, 2, kv_heads * group, head_dim, device=device).to(dtype)
    digests = torch.randn(num_blocks, kv_heads, 2, head_dim, device=device).sort(dim=2).values.to(dtype)
    table = torch.stack([torch.randperm(num_blocks, dtype=torch.int32) for _ in range(2)]).to(device)
    lanes, end = torch.tensor([1, 0], device=device), torch.tensor([num_blocks, num_blocks - 2], device=device)
    found = score(queries, digests, table, lanes, end).double()
    for entry, lane in enumerate(lanes.tolist()):
        q = queries[entry].double().view(2, kv_heads, group, 1, 1, head_dim)
        bounds = (q * digests.double()[table[lane].long()].transpose(0, 1)[None, :, None]).amax(dim=4).sum(dim=(2, 4))
        ranked = slice(1, end[entry].item())
        assert torch.allclose(found[entry][..., ranked], bounds[..., ranked], rtol=1e-5, atol=1e-3)


@BOTH_SCORE
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_score_bounds_the_products_with_all_keys_of_the_block(score, head_dim, device):
    kv = torch.randn(6, 2, 2, BLOCK_SIZE, head_dim, device=device)
    digests, queries = torch.empty(6, 2, 2, head_dim, device=device), torch.randn(1, 2, 6, head_dim, device=device)
    places = torch.arange(6, device=device)
    build_digests(kv, digests, places, places)
    lanes, end = torch.tensor([0], device=device), torch.tensor([6], device=device)
    scores = score(queries, digests, places[None].int(), lanes, end)[0]
    # [rows, kv_heads, blocks, 16]: the group's sum of q . k for each key.
    products = torch.einsum("rhgd,bhtd->rhbt", queries[0].view(2, 2, 3, head_dim), kv[:, :, 0])
    assert bool((scores[..., 1:] >= products.amax(dim=-1)[..., 1:] - 1e-3).all())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@BOTH_SCORE
def test_a_sum_that_is_no_number_is_ranked_last_but_ranked(score, device):
    queries = torch.ones(1, 2, 1, 4, device=device)
    digests = torch.zeros(5, 1, 2, 4, device=device)
    digests[2] = torch.nan
    digests[3] = -INF
    digests[4] = INF
    table = torch.tensor([[0, 2, 1, 3, 4]], dtype=torch.int32, device=device)
    scores = score(queries, digests, table, torch.tensor([0], device=device), torch.tensor([4], device=device))
    assert wanted_blocks(scores, 1)[0, 0, 0].tolist() == [False, False, True, False, False]
    assert wanted_blocks(scores, 3)[0, 0, 0].tolist() == [False, True, True, True, False]
    scores = score(queries, digests, table, torch.tensor([0], device=device), torch.tensor([5], device=device))
    assert scores[0, 0, 0, 1:].isfinite().all()


@BOTH_SCORE
def test_the_first_columns_of_a_wide_table_are_enough(score, device):
    queries, digests, table, lanes, _ = random_case(3, device, torch.float32)
    end = torch.full_like(lanes, 5)
    narrow = score(queries, digests, table[:, :5], lanes, end)
    assert torch.equal(narrow, score(queries, digests, table, lanes, end)[..., :5])


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("num_blocks", [97, 160])
def test_however_many_programs_share_the_blocks_the_scores_are_the_same(splits, num_blocks, device, dtype):
    queries, digests, table, lanes, _ = random_case(5, device, dtype, num_blocks=num_blocks)
    lanes[:3] = torch.tensor([4, 0, 3], device=device)
    end = torch.tensor([num_blocks, 33, 80, 0], device=device)
    found = score_blocks_triton(queries, digests, table, lanes, end, splits=splits)
    assert torch.equal(found, score_blocks_reference(queries, digests, table, lanes, end))


@pytest.mark.parametrize(("upper", "best_head"), [(0.75, True), (0.75, False), (1.0, True)])
def test_a_kernel_ranks_as_the_reference_by_other_bounds_and_by_the_best_head(
    monkeypatch, upper, best_head, device, dtype
):
    monkeypatch.setattr("minserve.kernels.score_blocks.UPPER", upper)
    monkeypatch.setattr("minserve.kernels.score_blocks.BEST_HEAD", best_head)
    case = random_case(2, device, dtype, num_blocks=40)  # integers by quarters are exact, too
    assert torch.equal(score_blocks_triton(*case), score_blocks_reference(*case))


@BOTH_WANT
@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7, 30])
@pytest.mark.parametrize("values", [1, 2, 100])
def test_exactly_the_best_are_wanted_and_of_equal_ones_the_lower_blocks(want, count, values, device):
    chance = random.Random(count)
    rows = [[float(chance.randrange(-values, values)) for _ in range(7)] for _ in range(8)]
    rows = [[score if chance.random() < 0.8 else -INF for score in row] for row in rows] + [[-INF] * 7]
    found = want(torch.tensor(rows, device=device).view(3, 3, 7), count).view(9, 7).tolist()
    for scores, wanted in zip(rows, found):
        assert {block for block, is_wanted in enumerate(wanted) if is_wanted} == first_wanted(scores, count)


@BOTH_WANT
@pytest.mark.parametrize("num_blocks", [1, 16, 33, 1000])
def test_as_many_are_wanted_as_there_can_be_in_rows_of_any_length(want, num_blocks, device):
    chance = torch.Generator().manual_seed(num_blocks)
    rows = torch.randn(4, num_blocks, generator=chance) * torch.tensor([[1.0], [1e-30], [1e30], [0.0]])
    rows[3, ::3] = -0.0  # equal to the others
    rows[1, 1::5] = -INF
    for count in (1, num_blocks // 2, num_blocks - 1):
        wanted = want(rows.to(device), count).tolist()
        for scores, found in zip(rows.tolist(), wanted):
            assert {block for block, is_wanted in enumerate(found) if is_wanted} == first_wanted(scores, count)


def test_the_threshold_is_the_last_score_that_is_wanted(device):
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0], [-INF, 1.0, -INF, -INF]], device=device)
    assert top_scores(scores, 1).tolist() == [[3.0], [1.0]]
    assert top_scores(scores, 3).tolist() == [[2.0], [-INF]]
    assert top_scores(scores, 9).tolist() == [[1.0], [-INF]]


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    queries, digests, table, lanes, end = random_case(0, device, torch.float32)
    for wrong in (
        (queries[:, :1], digests, table, lanes, end),
        (queries[:, :, :3].contiguous(), digests, table, lanes, end),
        (queries.half(), digests, table, lanes, end),
        (queries, digests, table.long(), lanes, end),
        (queries, digests, table, lanes[:2], end),
    ):
        with pytest.raises(AssertionError):
            score_blocks(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_digests_past_two_billion_elements_are_found(device):
    kv_heads, head_dim = 8, 128
    num_places = 2**31 // (kv_heads * 2 * head_dim) + 2
    digests = torch.empty(num_places, kv_heads, 2, head_dim, dtype=torch.bfloat16, device=device)
    digests[-1] = 1.0
    queries = torch.ones(1, 2, 4 * kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[0, num_places - 1]], dtype=torch.int32, device=device)
    scores = score_blocks(queries, digests, table, torch.tensor([0], device=device), torch.tensor([2], device=device))
    assert scores[..., 1].eq(4.0 * head_dim).all()
