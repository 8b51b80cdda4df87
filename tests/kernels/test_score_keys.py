"""What query heads expect to find in blocks of a shortlist, by the levels of keys, against loops over lists."""

import math

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels import score_keys as module
from minserve.kernels.build_digests import Digests, build_digests, digest_shapes, empty_digests
from minserve.kernels.fp8 import FP8
from minserve.kernels.score_blocks import MOST, empty_logits
from minserve.kernels.score_keys import expect_in_blocks, score_keys, score_keys_reference, score_keys_triton

from .working_sets import Digest, expected_digest, expected_key_logit, expected_logit, unpack_levels

INF = float("inf")
UNTOUCHED = 7.0

BOTH = pytest.mark.parametrize("score", [score_keys_reference, score_keys_triton], ids=["reference", "triton"])
WIDE_OR_NOT = pytest.mark.parametrize("in_8_bits", [False, True], ids=["wide", "fp8"])
SHORT_OR_NOT = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])


def random_lists(entries, kv_heads, count, num_blocks, lengths, device):
    """[entries, kv_heads, count] of blocks from 1 on, of any of the lengths."""
    lists = torch.full((entries, kv_heads, count), -1, dtype=torch.int32)
    for number, own in enumerate(lists.view(-1, count)):
        length = lengths[number % len(lengths)]
        own[:length] = 1 + torch.randperm(num_blocks - 1)[:length].sort().values
    return lists.to(device)


def random_case(
    seed, device, dtype, in_8_bits=False, *, kv_heads=2, group=3, head_dim=4, num_blocks=12, count=7,
    lengths=(7, 0, 5, 1),
):  # fmt: skip
    """Keys of small extremes and any levels; a table that is part of a wider one; one lane of four is padding."""
    torch.manual_seed(seed)
    places = 2 * num_blocks
    queries = torch.randn(4, 2, kv_heads * group, head_dim, device=device).to(dtype)
    shapes = digest_shapes(kv_heads, head_dim)
    extremes = torch.randn(places, *shapes[0], device=device).sort(dim=2).values.to(FP8)
    keys = torch.randint(0, 256, (places, *shapes[1]), dtype=torch.uint8, device=device)
    digests = Digests(extremes if in_8_bits else extremes.to(dtype), keys)
    table = torch.randint(0, places, (5, num_blocks + 3), dtype=torch.int32, device=device)
    lanes = torch.tensor([4, 0, -1, 1], device=device)
    shortlist = random_lists(4, kv_heads, count, num_blocks, lengths, device)
    shortlist[2] = -1
    table[2] = table[:, num_blocks:] = 10**9  # nobody's
    return queries, digests, table[:, :num_blocks], lanes, shortlist


def found(score, queries, digests, table, lanes, shortlist, **options):
    """The logits that come out, [entries, 2, kv_heads, blocks, group], of others UNTOUCHED."""
    logits = empty_logits(queries, shortlist.shape[1], table.shape[1]).fill_(UNTOUCHED)
    score(queries, digests, table, lanes, shortlist, logits, **options)
    return logits


def expected(queries, digests, table, lanes, shortlist):
    entries, _, heads, head_dim = queries.shape
    kv_heads, num_blocks = shortlist.shape[1], table.shape[1]
    extremes, levels = digests.extremes.float(), unpack_levels(digests.keys, head_dim // 2)
    queries, extremes, levels, table = (x.tolist() for x in (queries.float(), extremes, levels, table))
    logits = torch.full((entries, 2, kv_heads, num_blocks, heads // kv_heads), UNTOUCHED)
    for entry, own in enumerate(shortlist.tolist()):
        for head, blocks in enumerate(own):
            for block in (block for block in blocks if block >= 0):
                place = table[lanes[entry]][block]
                digest = Digest(extremes[place][head], levels[place][head])
                for row in range(2):
                    for member in range(heads // kv_heads):
                        q = queries[entry][row][head * (heads // kv_heads) + member]
                        logits[entry, row, head, block, member] = expected_key_logit(q, digest)
    return logits


def off(dtype):
    """By how much logits of a few units may be off: keys and they themselves are rounded, to float16 on a GPU."""
    return {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-3, "atol": 0.02}


@BOTH
@WIDE_OR_NOT
@SHORT_OR_NOT
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 4), (2, 3, 12), (3, 4, 32), (1, 8, 12)])
def test_listed_blocks_get_the_logit_of_their_keys_and_others_keep_theirs(
    score, in_8_bits, dtype, kv_heads, group, head_dim, device
):
    case = random_case(head_dim + group, device, dtype, in_8_bits, kv_heads=kv_heads, group=group, head_dim=head_dim)
    logits = found(score, *case)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float().cpu(), expected(*case), **off(dtype))


@BOTH
@WIDE_OR_NOT
@SHORT_OR_NOT
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (96, 1), (128, 4)])
def test_so_they_do_with_heads_as_models_have_them(score, in_8_bits, dtype, head_dim, group, device):
    case = random_case(
        1, device, dtype, in_8_bits, group=group, head_dim=head_dim, count=19, num_blocks=21, lengths=(19, 9)
    )
    case = case[0][:1].contiguous(), *case[1:3], case[3][:1], case[4][:1].contiguous()
    torch.testing.assert_close(found(score, *case).float().cpu(), expected(*case), **off(dtype))


@pytest.mark.parametrize("group", [3, 4])
def test_bfloat16_queries_are_as_good(group, device):
    if device.type == "cpu":
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    case = random_case(2, device, torch.bfloat16, True, group=group, head_dim=128)
    torch.testing.assert_close(found(score_keys_triton, *case).float().cpu(), expected(*case), **off(torch.bfloat16))


@BOTH
@SHORT_OR_NOT
@WIDE_OR_NOT
def test_what_a_key_is_worth_is_what_its_digest_stands_for(score, in_8_bits, dtype, device):
    """From keys to logits: as `build_digests` makes digests, and close to the keys' own logits."""
    torch.manual_seed(3)
    head_dim = 32
    kv, places = torch.randn(6, 2, 2, BLOCK_SIZE, head_dim, device=device), torch.arange(6, device=device)
    digests = empty_digests((6,), 2, head_dim, torch.float32, device)
    build_digests(kv, digests, places, places)
    digests = digests._replace(extremes=digests.extremes.to(FP8 if in_8_bits else dtype))
    queries = torch.randn(1, 2, 6, head_dim, device=device).to(dtype)
    shortlist = torch.tensor([[[1, 3, 4], [2, 5, -1]]], dtype=torch.int32, device=device)
    logits = found(score, queries, digests, places[None].int(), torch.tensor([0], device=device), shortlist)
    for head, blocks in enumerate(([1, 3, 4], [2, 5])):
        for block in blocks:
            digest = expected_digest(kv[block, head, 0].tolist())
            for row in range(2):
                own = queries[0, row, 3 * head : 3 * head + 3].tolist()
                wanted = torch.tensor([expected_key_logit(q, digest) for q in own])
                torch.testing.assert_close(logits[0, row, head, block].float().cpu(), wanted, **off(dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@BOTH
@SHORT_OR_NOT
def test_what_is_no_number_or_too_large_counts_as_the_nearest_that_may_be(score, dtype, device):
    extremes = torch.zeros(6, 1, 2, 2, device=device)
    extremes[1, :, :, 0] = 448.0
    extremes[2, :, :, 0] = -448.0
    extremes[3, :, 1, 0] = torch.nan  # one of them
    extremes[4, :, 1, 0] = 0.0234375
    keys = torch.zeros(6, 1, BLOCK_SIZE, 1, dtype=torch.uint8, device=device)
    keys[4, :, 0] = 3  # of one key the level of the first coordinate
    queries = torch.zeros(1, 2, 1, 4, device=device)
    queries[..., 1] = 4096.0
    table = torch.tensor([[0, 1, 2, 3, 4, 5]], dtype=torch.int32, device=device)
    shortlist = torch.tensor([[[1, 2, 3, 4, 5]]], dtype=torch.int32, device=device)
    case = queries.to(dtype), Digests(extremes.to(dtype), keys), table, torch.tensor([0], device=device), shortlist
    more = math.log(16)
    logits = found(score, *case)[0, 0, 0, :, 0].tolist()
    assert logits[1:] == pytest.approx([MOST + more, more - MOST, more - MOST, 48.0, more], rel=3e-4, abs=5e-3)
    assert logits[0] == UNTOUCHED


@BOTH
@SHORT_OR_NOT
def test_keys_far_apart_are_worth_as_much_as_the_best(score, dtype, device):
    """No exponential overflows, and none of the best is lost, whichever key it is."""
    extremes = torch.zeros(BLOCK_SIZE + 1, 1, 2, 2, device=device)
    extremes[:, :, 0, 0], extremes[:, :, 1, 0] = -300.0, 300.0
    keys = torch.zeros(BLOCK_SIZE + 1, 1, BLOCK_SIZE, 1, dtype=torch.uint8, device=device)
    for token in range(BLOCK_SIZE):
        keys[token + 1, 0, token] = 3
    queries = torch.zeros(1, 2, 1, 4, device=device)
    queries[..., 1] = 2.0  # the square root of head_dim
    table = torch.arange(BLOCK_SIZE + 1, dtype=torch.int32, device=device)[None]
    case = queries.to(dtype), Digests(extremes.to(dtype), keys), table, torch.tensor([0], device=device)
    logits = found(score, *case, table[None, :, 1:].contiguous())
    torch.testing.assert_close(
        logits[0, :, 0, 1:].float(), torch.full((2, 16, 1), 300.0, device=device), rtol=0, atol=0.3
    )


@SHORT_OR_NOT
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("count", [32, 45])
def test_however_many_programs_share_the_lists_the_logits_are_the_same(splits, count, dtype, device):
    case = random_case(5, device, dtype, num_blocks=60, count=count, lengths=(count, 0, count // 2, 3))
    logits = found(score_keys_triton, *case, splits=splits)
    assert torch.equal(logits, found(score_keys_triton, *case))
    torch.testing.assert_close(logits, found(score_keys_reference, *case), **off(dtype))


@SHORT_OR_NOT
@WIDE_OR_NOT
@pytest.mark.parametrize("tile", [8, 16, 32])
@pytest.mark.parametrize("side_by_side", [2, 4])
def test_neither_the_tile_nor_the_order_of_coordinates_matters(
    tile, side_by_side, in_8_bits, dtype, device, monkeypatch
):
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "SIDE_BY_SIDE", side_by_side)
    case = random_case(6, device, dtype, in_8_bits, head_dim=32, num_blocks=40, count=37, lengths=(37, 20))
    torch.testing.assert_close(found(score_keys_triton, *case), found(score_keys_reference, *case), **off(dtype))


def test_the_reference_writes_logits_that_lie_head_by_head_too(device):
    """As the reference of `score_blocks` leaves them on a CPU."""
    case = random_case(7, device, torch.float32)
    logits = torch.full((4, 2, 2, 3, 12), UNTOUCHED, device=device).transpose(3, 4)
    score_keys_reference(*case, logits)
    torch.testing.assert_close(logits.cpu(), expected(*case), **off(torch.float32))


def test_only_the_best_by_extremes_are_looked_at_again(device):
    """Of one head of one row: all others of the ranked ones are -inf."""
    queries, digests, table, lanes, _ = random_case(8, device, torch.float32, kv_heads=1, group=1, head_dim=8)
    queries[:, 1] = queries[:, 0]
    end = torch.full_like(lanes, 10)
    logits = expect_in_blocks(queries, digests, table, lanes, end, 4)[:, 0, 0, :, 0].tolist()
    assert logits[2] == [-INF] * 12  # padding
    for entry in (0, 1, 3):
        q, places = queries[entry, 0, 0].tolist(), table[lanes[entry]].tolist()
        extremes = [digests.extremes[place, 0].tolist() for place in places]
        best = sorted(range(1, 10), key=lambda block: -expected_logit(q, extremes[block]))[:4]
        for block in range(12):
            levels = unpack_levels(digests.keys[places[block], 0], 4).tolist()
            wanted = expected_key_logit(q, Digest(extremes[block], levels)) if block in best else -INF
            assert logits[entry][block] == pytest.approx(wanted, abs=1e-4)


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    queries, digests, table, lanes, shortlist = random_case(0, device, torch.float32)
    logits = empty_logits(queries, 2, 12)
    score_keys(queries, digests, table, lanes, shortlist, logits)
    for wrong in (
        (torch.cat((queries, queries[:, :1]), dim=1), digests, table, lanes, shortlist, logits[:, [0, 1, 1]]),
        (queries[:, :, :3].contiguous(), digests, table, lanes, shortlist, logits),
        (queries[..., :2].contiguous(), digests, table, lanes, shortlist, logits),
        (queries, digests._replace(keys=digests.keys[:, :, :8]), table, lanes, shortlist, logits),
        (queries, digests._replace(keys=digests.keys.int()), table, lanes, shortlist, logits),
        (queries, digests, table.long(), lanes, shortlist, logits),
        (queries, digests, table[:, :11], lanes, shortlist, logits),
        (queries, digests, table, lanes[:2], shortlist, logits),
        (queries, digests, table, lanes, shortlist.long(), logits),
        (queries, digests, table, lanes, shortlist[:, :1].contiguous(), logits),
        (queries, digests, table, lanes, shortlist[..., ::2], logits),
        (queries, digests, table, lanes, shortlist, logits[..., :1]),
        (queries, digests, table, lanes, shortlist, logits.double()),
    ):
        with pytest.raises(AssertionError):
            score_keys(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter knows no NaN of 8 bits")
def test_what_is_no_number_in_8_bits_is_the_worst(device):
    queries = torch.ones(1, 2, 1, 32, dtype=torch.float16, device=device)
    digests = empty_digests((3,), 1, 32, torch.float16, device)
    digests.extremes.zero_()
    digests.keys.zero_()
    digests.extremes[1, :, 0, 3] = torch.nan
    table, lanes = torch.arange(3, dtype=torch.int32, device=device)[None], torch.tensor([0], device=device)
    logits = found(score_keys_triton, queries, digests, table, lanes, table[None, :, 1:].contiguous())
    assert logits[0, 0, 0, 1:, 0].tolist() == pytest.approx([-MOST, math.log(16)], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_digests_past_two_billion_elements_are_found(device):
    kv_heads, head_dim = 8, 128
    digests = empty_digests((2**31 // (kv_heads * head_dim) + 2,), kv_heads, head_dim, torch.bfloat16, device)
    digests.extremes[-1].copy_(torch.ones((), device=device))
    digests.keys[-1].zero_()
    queries = torch.ones(1, 2, 4 * kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[0, len(digests.keys) - 1]], dtype=torch.int32, device=device)
    shortlist = torch.ones(1, kv_heads, 1, dtype=torch.int32, device=device)
    logits = found(score_keys_triton, queries, digests, table, torch.tensor([0], device=device), shortlist)[:, :, :, 1]
    wanted = head_dim // 2 / head_dim**0.5 + math.log(16)
    torch.testing.assert_close(logits, torch.full_like(logits, wanted), rtol=0, atol=0.02)
