"""Scores of blocks by their digests, and which are wanted, against loops over lists."""

import random

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import build_digests
from minserve.kernels.score_blocks import score_blocks, top_scores, wanted_blocks

from .working_sets import first_wanted

INF = float("inf")


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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 4), (1, 8)])
def test_a_score_is_the_sum_of_bounds_and_only_ranked_blocks_have_one(seed, kv_heads, group, device, dtype):
    case = random_case(seed, device, dtype, kv_heads=kv_heads, group=group)
    scores = score_blocks(*case)
    assert scores.shape == (4, 2, kv_heads, 9)
    assert scores.flatten().tolist() == expected(*case)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_score_bounds_the_products_with_all_keys_of_the_block(head_dim, device):
    kv = torch.randn(6, 2, 2, BLOCK_SIZE, head_dim, device=device)
    digests, queries = torch.empty(6, 2, 2, head_dim, device=device), torch.randn(1, 2, 6, head_dim, device=device)
    places = torch.arange(6, device=device)
    build_digests(kv, digests, places, places)
    lanes, end = torch.tensor([0], device=device), torch.tensor([6], device=device)
    scores = score_blocks(queries, digests, places[None].int(), lanes, end)[0]
    # [rows, kv_heads, blocks, 16]: the group's sum of q . k for each key.
    products = torch.einsum("rhgd,bhtd->rhbt", queries[0].view(2, 2, 3, head_dim), kv[:, :, 0])
    assert bool((scores[..., 1:] >= products.amax(dim=-1)[..., 1:] - 1e-3).all())


def test_a_sum_that_is_no_number_is_ranked_last_but_ranked(device):
    queries = torch.ones(1, 2, 1, 4, device=device)
    digests = torch.zeros(4, 1, 2, 4, device=device)
    digests[2] = torch.nan
    digests[3] = -INF
    table = torch.tensor([[0, 2, 1, 3]], dtype=torch.int32, device=device)
    scores = score_blocks(queries, digests, table, torch.tensor([0], device=device), torch.tensor([4], device=device))
    assert wanted_blocks(scores, 1)[0, 0, 0].tolist() == [False, False, True, False]
    assert wanted_blocks(scores, 3)[0, 0, 0].tolist() == [False, True, True, True]


def test_the_first_columns_of_a_wide_table_are_enough(device):
    queries, digests, table, lanes, _ = random_case(3, device, torch.float32)
    end = torch.full_like(lanes, 5)
    narrow = score_blocks(queries, digests, table[:, :5], lanes, end)
    assert torch.equal(narrow, score_blocks(queries, digests, table, lanes, end)[..., :5])


@pytest.mark.parametrize("count", [0, 1, 2, 5, 6, 7, 30])
@pytest.mark.parametrize("values", [1, 2, 100])
def test_exactly_the_best_are_wanted_and_of_equal_ones_the_lower_blocks(count, values, device):
    chance = random.Random(count)
    rows = [[float(chance.randrange(-values, values)) for _ in range(7)] for _ in range(20)]
    rows = [[score if chance.random() < 0.8 else -INF for score in row] for row in rows] + [[-INF] * 7]
    found = wanted_blocks(torch.tensor(rows, device=device).view(3, 7, 7), count).view(21, 7).tolist()
    for scores, wanted in zip(rows, found):
        assert {block for block, is_wanted in enumerate(wanted) if is_wanted} == first_wanted(scores, count)


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
