"""What query heads expect to find in the blocks of a list, by the levels of their keys, against loops over lists."""

import random

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.build_digests import Digests, build_digests, empty_digests
from minserve.kernels.fp8 import FP8
from minserve.kernels.score_blocks import MOST, empty_logits
from minserve.kernels.score_keys import expect_in_blocks, score_keys, score_keys_reference, score_keys_triton

from .working_sets import Digest, by_head, expected_digest, expected_key_logit, expected_logit, slow

INF = float("inf")
UNTOUCHED = 77.0

BOTH = pytest.mark.parametrize("score", [score_keys_reference, score_keys_triton])
WIDE_OR_NOT = pytest.mark.parametrize("in_8_bits", [False, True], ids=["wide", "fp8"])


def scored(score, queries, digests, table, lanes, shortlist, **options):
    """[entries, 2, heads, blocks]"""
    logits = empty_logits(queries, shortlist.shape[1], table.shape[1])
    logits.fill_(UNTOUCHED)
    logits[:, :, :, 0] = -INF
    score(queries, digests, table, lanes, shortlist, logits, **options)
    return by_head(logits)


def digests_of(keys, in_8_bits):
    """keys: [places, kv_heads, 16, head_dim]"""
    places, kv_heads, _, head_dim = keys.shape
    digests = empty_digests((places,), kv_heads, head_dim, torch.float32, torch.device("cpu"))
    number = torch.arange(places)
    build_digests(torch.stack((keys, torch.zeros_like(keys)), dim=2).contiguous().cpu(), digests, number, number)
    extremes = digests.extremes.to(keys.device)
    return Digests(extremes.to(FP8) if in_8_bits else extremes, digests.keys.to(keys.device))


def listed(chance, entries, kv_heads, count, num_blocks):
    """Lists of different lengths, some of them empty."""
    lists = torch.full((entries, kv_heads, count), -1, dtype=torch.int32)
    for own in lists.flatten(0, 1):
        length = chance.choice([0, 1, count // 2, count])
        own[:length] = torch.tensor(sorted(chance.sample(range(1, num_blocks), length)), dtype=torch.int32)
    return lists


def random_case(seed, device, dtype, in_8_bits=False, *, kv_heads=2, group=3, head_dim=4, num_blocks=9, count=4):
    torch.manual_seed(seed)
    keys = torch.randint(-6, 7, (num_blocks + 3, kv_heads, BLOCK_SIZE, head_dim), device=device).float()
    queries = torch.randint(-3, 4, (4, 2, kv_heads * group, head_dim), device=device).to(dtype)
    table = torch.stack([torch.randperm(num_blocks + 3, dtype=torch.int32)[:num_blocks] for _ in range(5)]).to(device)
    shortlist = listed(random.Random(seed), 4, kv_heads, count, num_blocks)
    lanes = torch.tensor([4, -1, 0, 3], device=device)
    shortlist[1] = -1
    return queries, digests_of(keys, in_8_bits), table, lanes, shortlist.to(device)


def expected(queries, digests, table, lanes, shortlist):
    """By the digests as they are."""
    kv_heads, group = shortlist.shape[1], queries.shape[2] // shortlist.shape[1]
    logits = torch.full((*queries.shape[:3], table.shape[1]), UNTOUCHED)
    logits[..., 0] = -INF
    extremes, size = digests.extremes.float().tolist(), digests.extremes.shape[-1]
    for entry, lane in enumerate(lanes.tolist()):
        for head in range(kv_heads):
            for block in (block for block in shortlist[entry, head].tolist() if block >= 0):
                place = int(table[lane, block])
                digest = Digest(extremes[place][head], levels_of(digests.keys[place, head].tolist(), size))
                for row in range(2):
                    for member in range(head * group, (head + 1) * group):
                        logits[entry, row, member, block] = expected_key_logit(
                            queries[entry, row, member].tolist(), digest
                        )
    return logits


def levels_of(keys, size):
    """[16][size] of a block's bytes."""
    return [[key[d % len(key)] >> d // len(key) * 2 & 3 for d in range(size)] for key in keys]


def off(dtype):
    """By how much a logit may be off, of keys of up to 6 and queries of up to 3."""
    return {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-3, "atol": 0.03}


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 4), (2, 3, 8), (3, 4, 24), (1, 8, 12)])
def test_every_head_has_a_logit_for_listed_blocks_and_others_stay(
    score, in_8_bits, seed, kv_heads, group, head_dim, device, dtype
):
    case = random_case(seed, device, dtype, in_8_bits, kv_heads=kv_heads, group=group, head_dim=head_dim)
    found = scored(score, *case)
    torch.testing.assert_close(found.float().cpu(), expected(*case), **off(dtype))


@BOTH
@WIDE_OR_NOT
@pytest.mark.parametrize(
    ("num_blocks", "count", "kv_heads", "group", "head_dim"),
    [(40, 33, 2, 3, 64), (30, 17, 1, 8, 128), (9, 8, 2, 1, 96)],
)
def test_logits_of_real_sizes_are_those_in_higher_precision(
    score, in_8_bits, num_blocks, count, kv_heads, group, head_dim, device, dtype
):
    torch.manual_seed(num_blocks)
    keys = torch.randn(num_blocks, kv_heads, BLOCK_SIZE, head_dim, device=device)
    digests, queries = digests_of(keys, in_8_bits), torch.randn(2, 2, kv_heads * group, head_dim, device=device)
    table = torch.stack([torch.randperm(num_blocks, dtype=torch.int32) for _ in range(2)]).to(device)
    lanes, shortlist = torch.tensor([1, 0], device=device), listed(random.Random(1), 2, kv_heads, count, num_blocks)
    found = scored(score, queries.to(dtype), digests, table, lanes, shortlist.to(device)).double()
    least, most = digests.extremes.double().unsqueeze(3).unbind(2)
    levels = torch.tensor(
        [[levels_of(own, head_dim // 2) for own in heads] for heads in digests.keys.tolist()], device=device
    )
    rounded = least + (most - least) * levels / 3  # [places, kv_heads, 16, slow]
    for entry, lane in enumerate(lanes.tolist()):
        own = rounded[table[lane].long()].repeat_interleave(group, dim=1)  # [blocks, heads, 16, slow]
        q = queries[entry].to(dtype).double()[..., slow(head_dim)]
        logits = (torch.einsum("rhd,bhtd->rhbt", q, own) / head_dim**0.5).logsumexp(dim=3)
        for head in range(kv_heads):
            blocks = shortlist[entry, head][shortlist[entry, head] >= 0].long()
            heads = slice(head * group, (head + 1) * group)
            # Keys are rounded to float16: sums of head_dim / 2 errors of 2^-11 each, of products of about 1.
            error = 1e-4 if dtype == torch.float32 else 0.01
            assert torch.allclose(found[entry, :, heads][..., blocks], logits[:, heads][..., blocks], atol=error)


@BOTH
def test_a_block_whose_keys_are_levels_is_worth_what_attention_would_give_it(score, device):
    """Of keys 0, 1, 2 and 3 in each coordinate nothing is rounded, and the fast coordinates are not asked for."""
    keys = torch.randint(0, 4, (6, 2, BLOCK_SIZE, 16), device=device).float()
    keys[:, :, 0], keys[:, :, 1] = 0.0, 3.0
    queries = torch.zeros(1, 2, 4, 16, device=device)
    queries[..., slow(16)] = torch.randn(1, 2, 4, 8, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device)[None]
    shortlist = torch.arange(1, 6, dtype=torch.int32, device=device).expand(1, 2, 5).contiguous()
    found = scored(score, queries, digests_of(keys, True), table, torch.tensor([0], device=device), shortlist)
    q = queries[0].view(2, 2, 2, 16) / 4
    logits = torch.einsum("rhgd,bhtd->rhgbt", q, keys).logsumexp(dim=4).flatten(1, 2)
    torch.testing.assert_close(found[0, ..., 1:], logits[..., 1:], rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@BOTH
def test_what_is_no_number_is_the_worst(score, device):
    queries = torch.ones(1, 2, 1, 4, device=device)
    digests = digests_of(torch.zeros(6, 1, BLOCK_SIZE, 4, device=device), False)
    digests.extremes[2] = torch.nan
    digests.extremes[3, 0, 0] = -INF
    digests.extremes[4] = 1e9
    digests.extremes[5] = -1e9
    table, lanes = torch.arange(6, dtype=torch.int32, device=device)[None], torch.tensor([0], device=device)
    shortlist = torch.arange(1, 6, dtype=torch.int32, device=device)[None, None]
    more = torch.tensor(16.0).log().item()
    expected = [more, more - MOST, more - MOST, more + MOST, more - MOST]
    found = scored(score, queries, digests, table, lanes, shortlist)
    assert found[0, 0, 0, 1:].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_however_many_programs_share_a_list_the_logits_are_the_same(splits, device, dtype):
    case = random_case(5, device, dtype, num_blocks=150, count=97)
    found = scored(score_keys_triton, *case, splits=splits)
    assert torch.equal(found, scored(score_keys_triton, *case, splits=3))
    torch.testing.assert_close(found, scored(score_keys_reference, *case), **off(dtype))


@BOTH
def test_the_first_columns_of_a_wide_table_are_enough(score, device):
    queries, digests, table, lanes, shortlist = random_case(3, device, torch.float32)
    wide = torch.cat((table, torch.full_like(table, -1)), dim=1)[:, : table.shape[1]]
    found = scored(score, queries, digests, wide, lanes, shortlist)
    assert torch.equal(found, scored(score, queries, digests, table, lanes, shortlist))


def test_blocks_are_looked_at_again_if_they_are_among_the_best_at_first_sight(device):
    """One head. By extremes and by levels the same blocks are good, mostly, but not to the same degree."""
    torch.manual_seed(2)
    keys = torch.randn(30, 1, BLOCK_SIZE, 8, device=device)
    queries, table = torch.randn(1, 1, 1, 8, device=device), torch.arange(30, dtype=torch.int32, device=device)[None]
    lanes, end = torch.tensor([0], device=device), torch.tensor([28], device=device)
    digests, both = digests_of(keys, False), queries.expand(1, 2, 1, 8).contiguous()
    found = by_head(expect_in_blocks(both, digests, table, lanes, end, 7))[0, 0, 0].tolist()
    own = [expected_digest(key) for key in keys[:, 0].tolist()]
    first = [expected_logit(queries[0, 0, 0].tolist(), digest.extremes) for digest in own]
    best = sorted(range(1, 28), key=lambda block: -first[block])[:7]
    for block, logit in enumerate(found):
        second = expected_key_logit(queries[0, 0, 0].tolist(), own[block])
        assert logit == (pytest.approx(second, abs=1e-4) if block in best else -INF)


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    queries, digests, table, lanes, shortlist = random_case(0, device, torch.float32)
    logits = empty_logits(queries, 2, table.shape[1])
    for wrong in (
        (queries[:, :1], digests, table, lanes, shortlist, logits),
        (queries, digests._replace(keys=digests.keys[:, :, :8]), table, lanes, shortlist, logits),
        (queries, digests._replace(keys=digests.keys.int()), table, lanes, shortlist, logits),
        (queries, digests, table.long(), lanes, shortlist, logits),
        (queries, digests, table, lanes[:2], shortlist, logits),
        (queries, digests, table, lanes, shortlist.long(), logits),
        (queries, digests, table, lanes, shortlist, logits[:, :, :, :5]),
    ):
        with pytest.raises(AssertionError):
            score_keys(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_digests_past_two_billion_elements_are_found(device):
    kv_heads, head_dim = 8, 128
    num_places = 2**31 // (kv_heads * 2 * head_dim) + 2
    digests = empty_digests((num_places,), kv_heads, head_dim, torch.bfloat16, device)
    digests.extremes[-1], digests.keys[-1] = torch.ones((), device=device), 0
    queries = torch.ones(1, 2, 4 * kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    table, lanes = (
        torch.tensor([[0, num_places - 1]], dtype=torch.int32, device=device),
        torch.tensor([0], device=device),
    )
    shortlist = torch.ones(1, kv_heads, 1, dtype=torch.int32, device=device)
    found = scored(score_keys, queries, digests, table, lanes, shortlist)[..., 1]
    expected = head_dim // 2 / head_dim**0.5 + torch.tensor(16.0).log().item()
    torch.testing.assert_close(found, torch.full_like(found, expected), rtol=0, atol=0.02)
