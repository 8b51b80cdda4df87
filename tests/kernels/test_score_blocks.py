"""What query heads expect to find in blocks, by their digests, against loops over lists."""

import random

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import build_digests
from minserve.kernels.score_blocks import MOST, score_blocks, score_blocks_reference, score_blocks_triton

from .working_sets import expected_logit

INF = float("inf")
BOTH = pytest.mark.parametrize("score", [score_blocks_reference, score_blocks_triton])


def random_case(seed, device, dtype, *, kv_heads=2, group=3, head_dim=4, num_blocks=9):
    """Integers, few of them, whose quarters are summed exactly; so is half of that, where head_dim is 4."""
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
    group = len(queries[0][0]) // len(digests[0])
    logits = []
    for entry, (lane, last) in enumerate(zip(lanes.tolist(), end.tolist())):
        for row in range(2):
            for head, q in enumerate(queries[entry][row]):
                for block, place in enumerate(table[lane]):
                    is_ranked = lane >= 0 and 1 <= block < last and place >= 0
                    logits.append(expected_logit(q, *digests[place][head // group]) if is_ranked else -INF)
    return logits


@BOTH
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 4), (1, 8)])
def test_every_head_has_a_logit_for_ranked_blocks_and_no_others(score, seed, kv_heads, group, device, dtype):
    case = random_case(seed, device, dtype, kv_heads=kv_heads, group=group)
    logits = score(*case)
    assert logits.shape == (4, 2, kv_heads * group, 9)
    assert logits.flatten().tolist() == expected(*case)


@BOTH
@pytest.mark.parametrize(
    ("num_blocks", "kv_heads", "group", "head_dim"), [(33, 2, 3, 64), (97, 1, 8, 128), (32, 3, 1, 96)]
)
def test_logits_of_any_number_of_blocks_are_those_in_higher_precision(
    score, num_blocks, kv_heads, group, head_dim, device, dtype
):
    torch.manual_seed(num_blocks)
    queries = torch.randn(2, 2, kv_heads * group, head_dim, device=device).to(dtype)
    digests = torch.randn(num_blocks, kv_heads, 2, head_dim, device=device).sort(dim=2).values.to(dtype)
    table = torch.stack([torch.randperm(num_blocks, dtype=torch.int32) for _ in range(2)]).to(device)
    lanes, end = torch.tensor([1, 0], device=device), torch.tensor([num_blocks, num_blocks - 2], device=device)
    found = score(queries, digests, table, lanes, end).double()
    for entry, lane in enumerate(lanes.tolist()):
        q = queries[entry].double().view(2, kv_heads, group, 1, head_dim)
        least, most = digests.double()[table[lane].long()].permute(2, 1, 0, 3)[:, None, :, None]
        logits = (q * (least + most) / 2 + q.abs() * (most - least) / 4).sum(dim=-1).flatten(1, 2) / head_dim**0.5
        ranked = slice(1, end[entry].item())
        # Weights are rounded to the digests' dtype: sums of head_dim errors of 2^-9 each, of products of about 1.
        error = 1e-4 if dtype == torch.float32 else 0.02
        assert torch.allclose(found[entry][..., ranked], logits[..., ranked], rtol=0, atol=error)


@BOTH
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_logit_is_half_way_from_the_middle_to_the_most_that_a_key_can_have(score, head_dim, device):
    kv = torch.randn(6, 2, 2, BLOCK_SIZE, head_dim, device=device)
    digests, queries = torch.empty(6, 2, 2, head_dim, device=device), torch.randn(1, 2, 6, head_dim, device=device)
    places = torch.arange(6, device=device)
    build_digests(kv, digests, places, places)
    lanes, end = torch.tensor([0], device=device), torch.tensor([6], device=device)
    logits = score(queries, digests, places[None].int(), lanes, end)[0].view(2, 2, 3, 6)
    keys = kv[:, :, 0]  # [blocks, kv_heads, 16, head_dim]
    q = queries[0].view(2, 2, 3, 1, head_dim) / head_dim**0.5
    least, most = (extreme.transpose(0, 1)[:, None] for extreme in (keys.amin(2), keys.amax(2)))
    bound, middle = torch.maximum(q * least, q * most).sum(-1), (q * (least + most) / 2).sum(-1)
    products = torch.einsum("rhgd,bhtd->rhgbt", q[..., 0, :], keys)
    assert bool((bound >= products.amax(dim=-1) - 1e-4).all())
    torch.testing.assert_close(logits[..., 1:], ((middle + bound) / 2)[..., 1:], rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@BOTH
def test_what_is_no_number_is_ranked_last_but_ranked(score, device):
    queries = torch.ones(1, 2, 1, 4, device=device)
    digests = torch.zeros(5, 1, 2, 4, device=device)
    digests[2] = torch.nan
    digests[3] = -INF
    digests[4] = INF
    table = torch.tensor([[0, 2, 1, 3, 4]], dtype=torch.int32, device=device)
    logits = score(queries, digests, table, torch.tensor([0], device=device), torch.tensor([5], device=device))
    assert logits[0, 0, 0].tolist() == [-INF, -MOST, 0.0, -MOST, MOST]


@BOTH
def test_the_first_columns_of_a_wide_table_are_enough(score, device):
    queries, digests, table, lanes, _ = random_case(3, device, torch.float32)
    end = torch.full_like(lanes, 5)
    narrow = score(queries, digests, table[:, :5], lanes, end)
    assert torch.equal(narrow, score(queries, digests, table, lanes, end)[..., :5])


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("num_blocks", [97, 160])
def test_however_many_programs_share_the_blocks_the_logits_are_the_same(splits, num_blocks, device, dtype):
    queries, digests, table, lanes, _ = random_case(5, device, dtype, num_blocks=num_blocks)
    lanes[:3] = torch.tensor([4, 0, 3], device=device)
    end = torch.tensor([num_blocks, 33, 80, 0], device=device)
    found = score_blocks_triton(queries, digests, table, lanes, end, splits=splits)
    assert torch.equal(found, score_blocks_reference(queries, digests, table, lanes, end))


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
    logits = score_blocks(queries, digests, table, torch.tensor([0], device=device), torch.tensor([2], device=device))
    torch.testing.assert_close(logits[..., 1], torch.full_like(logits[..., 1], head_dim**0.5))
