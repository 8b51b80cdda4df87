"""What KV heads want, and what they lack, against a straight telling of the formulas in loops."""

import pytest
import torch

from minserve.kernels.rank_blocks import LEAST_SHARE, rank_blocks, rank_blocks_reference, rank_blocks_triton
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL

from .working_sets import Lanes, by_block, first_wanted, group_scores

INF = float("inf")
BOTH = pytest.mark.parametrize("rank", [rank_blocks_reference, rank_blocks_triton])


def random_logits(lanes, entries, group, num_blocks, advance, values, scale):
    """[entries, 2, heads, num_blocks] for some of the blocks [1, ring_start + advance); of few values, if so many."""
    chance, shape = lanes.random, (len(entries), 2, lanes.kv_heads * group, num_blocks)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(chance.randrange(1000)))
    if values:
        logits = logits.mul(values / 2).round() / values
    for entry, lane in enumerate(entries):
        end = lanes.start(lane) + advance if lane >= 0 else 0
        for block in range(num_blocks):
            if not 1 <= block < end or chance.random() < 0.05:
                logits[entry, :, :, block] = -INF
    return logits * scale


def check(rank, logits, lanes, entries, count, device):
    """Scores are near the formula's; what is wanted, and what is lacking of it, follows from them exactly. The normal
    row's are those that it has where it takes the other's place."""
    ranking, other = (ranked(rank, each, lanes, entries, count, device) for each in (logits, logits.flip(1)))
    all_scores = torch.stack((ranking.scores, other.scores), dim=1)
    assert (LOOKAHEAD, NORMAL) == (0, 1)
    assert torch.equal(other.wanted, ranking.wanted.flip(1))
    group = logits.shape[2] // lanes.kv_heads
    for entry, lane in enumerate(entries):
        for head in range(lanes.kv_heads):
            held = {block for block in lanes.slot_block[lane][head] if block >= 0} if lane >= 0 else set()
            for row in (LOOKAHEAD, NORMAL):
                own = logits[entry, row, head * group : (head + 1) * group].tolist()
                scores, shares = group_scores(own, held)
                found = all_scores[entry, row, head].tolist()
                assert found == pytest.approx(scores, rel=1e-5, abs=1e-4)
                wanted = {block for block, best in enumerate(ranking.wanted[entry, row, head].tolist()) if best}
                assert wanted == first_wanted(found, count)
            missing = [block for block in wanted - held if block < lanes.start(lane)]  # of the normal row
            lacking = sum(own[block] ** 2 for own in shares for block in missing) / group
            assert ranking.lacking[entry, head].item() == pytest.approx(lacking, rel=1e-4, abs=1e-6)
            worth = {block for block, best in enumerate(ranking.worth[entry, head].tolist()) if best}
            assert wanted >= worth >= wanted - set(missing)
            for block in missing:
                share = sum(own[block] for own in shares) / group
                assert (block in worth) == (share > LEAST_SHARE) or share == pytest.approx(LEAST_SHARE, rel=1e-3)


def ranked(rank, logits, lanes, entries, count, device):
    ids, start = torch.tensor(entries), torch.tensor([lanes.start(lane) for lane in entries])
    slots = lanes.maps(device).block_slot
    return rank(by_block(logits.to(device), lanes.kv_heads), slots, ids.to(device), start.to(device), count)


@BOTH
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (3, 3), (2, 4), (1, 8)])
def test_a_ranking_follows_from_its_formulas(rank, seed, kv_heads, group, device):
    lanes = Lanes(seed, kv_heads=kv_heads, num_slots=1 + seed % 7)
    chance = lanes.random
    entries, advance = lanes.entries(4), chance.choice([0, 1])
    num_blocks = chance.choice([lanes.max_blocks, lanes.max_blocks - 2])
    logits = random_logits(lanes, entries, group, num_blocks, advance, chance.choice([None, 1]), chance.choice([1, 5]))
    count = chance.choice([0, lanes.num_slots - 1, lanes.num_slots, 99])
    check(rank, logits, lanes, entries, count, device)


@BOTH
@pytest.mark.parametrize(
    ("num_blocks", "kv_heads", "group", "count"), [(1, 1, 2, 3), (33, 3, 3, 8), (1000, 1, 4, 127), (1025, 2, 1, 1)]
)
def test_as_many_are_wanted_as_there_can_be_in_rows_of_any_length(rank, num_blocks, kv_heads, group, count, device):
    lanes = Lanes(3, num_lanes=2, kv_heads=kv_heads, num_slots=6, max_blocks=num_blocks + 3)
    lanes.ring_start = [num_blocks, max(num_blocks - 5, 0)]
    entries = [1, 0]
    logits = random_logits(lanes, entries, group, num_blocks, 0, None, 4.0)
    check(rank, logits, lanes, entries, count, device)


@BOTH
def test_numbers_as_large_as_logits_can_be_are_ranked(rank, device):
    lanes = Lanes(0, num_lanes=1, kv_heads=1, num_slots=1)
    lanes.ring_start, lanes.slot_block = [20], [[[-1]]]
    logits = torch.full((1, 2, 2, 20), -1e4)
    logits[..., 5], logits[..., 7] = 1e4, 80.0
    ranking = ranked(rank, logits, lanes, [0], 2, device)
    assert ranking.scores.isfinite().all()
    assert ranking.wanted[0, 0, 0].nonzero().flatten().tolist() == [5, 7]
    assert ranking.lacking.tolist() == [[pytest.approx(1.0, rel=1e-4)]]
    ranking = ranked(rank, torch.full_like(logits, -1e4), lanes, [0], 2, device)
    assert ranking.wanted[0, 0, 0].nonzero().flatten().tolist() == [0, 1]
    assert ranking.lacking.tolist() == [[pytest.approx(2 / 20**2, rel=1e-3)]]


@BOTH
@pytest.mark.parametrize(("ahead", "wanted"), [(0.3, 3), (0.45, 3), (0.55, 8), (2.0, 8)])
def test_a_held_block_wins_against_one_that_is_ahead_by_less_than_half_a_nat(rank, ahead, wanted, device):
    """Block 3 is in a slot of the second KV head; in the first, none but block 0 is."""
    lanes = Lanes(0, num_lanes=1, kv_heads=2, num_slots=2)
    lanes.ring_start, lanes.slot_block = [12], [[[0, -1], [0, 3]]]
    logits = torch.full((1, 2, 4, 20), -INF)
    logits[..., 1:12] = -3.0
    logits[..., 3], logits[..., 8] = 1.0, 1.0 + ahead
    ranking = ranked(rank, logits, lanes, [0], 1, device)
    assert ranking.wanted.nonzero()[:, 3].view(2, 2).tolist() == [[8, wanted], [8, wanted]]
    share = logits[0, 0, 0].softmax(0)[8].item()
    assert ranking.lacking[0].tolist() == pytest.approx([share**2, share**2 if wanted == 8 else 0.0], rel=1e-4)


@BOTH
def test_a_block_that_one_head_needs_alone_beats_one_that_all_heads_like_a_little(rank, device):
    lanes = Lanes(0, num_lanes=1, kv_heads=1, num_slots=2)
    lanes.ring_start, lanes.slot_block = [20], [[[0, -1]]]
    logits = torch.zeros(1, 2, 4, 20)
    logits[..., 0], logits[..., 4], logits[:, :, 2, 9] = -INF, 1.0, 6.0
    assert ranked(rank, logits, lanes, [0], 1, device).wanted.nonzero()[:, 3].tolist() == [9, 9]


@BOTH
def test_what_is_in_the_ring_or_wanted_by_the_lookahead_row_alone_is_not_lacking(rank, device):
    lanes = Lanes(0, num_lanes=1, kv_heads=1, num_slots=2)
    lanes.ring_start, lanes.slot_block = [5], [[[0, 2]]]
    logits = torch.zeros(1, 2, 1, 20)
    logits[..., 0], logits[..., 6:] = -INF, -INF
    logits[:, NORMAL, :, 5], logits[:, NORMAL, :, 2], logits[:, LOOKAHEAD, :, 3] = 4.0, 3.0, 9.0
    ranking = ranked(rank, logits, lanes, [0], 2, device)
    assert ranking.wanted[0, NORMAL, 0].nonzero().flatten().tolist() == [2, 5]
    assert ranking.wanted[0, LOOKAHEAD, 0, 3]
    assert ranking.lacking.tolist() == [[0.0]]


@BOTH
def test_a_missing_block_is_worth_a_late_fetch_from_two_thousandths_of_the_attention_on(rank, device):
    lanes = Lanes(0, num_lanes=1, kv_heads=1, num_slots=2)
    lanes.ring_start, lanes.slot_block = [18], [[[0, 4]]]
    shares = torch.tensor([[0.0019, 0.0019], [0.0038, 0.0], [0.0042, 0.0], [0.0021, 0.0021], [0.001, 0.001]])
    logits = torch.full((1, 2, 2, 20), -INF)
    logits[:, :, :, 1:6] = shares.log().T
    logits[..., 6] = torch.log(1 - shares.sum(0))
    logits[:, :, :, [4, 5]] = logits[:, :, :, [5, 4]]  # block 4, which is held, has a thousandth
    ranking = ranked(rank, logits, lanes, [0], 20, device)
    assert ranking.wanted[0, NORMAL, 0].nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert ranking.worth[0, 0].nonzero().flatten().tolist() == [3, 4, 5, 6]
    missing = logits[0, NORMAL, :, [1, 2, 3, 5, 6]].exp()
    assert ranking.lacking.item() == pytest.approx(missing.square().sum().item() / 2, rel=1e-4)


@BOTH
def test_padding_wants_and_lacks_nothing(rank, device):
    lanes = Lanes(1, num_lanes=2, kv_heads=2, num_slots=4)
    ranking = ranked(rank, torch.full((2, 2, 6, 20), -INF), lanes, [-1, -1], 3, device)
    assert ranking.scores.eq(-INF).all()
    assert not ranking.wanted.any()
    assert not ranking.lacking.any()
    assert not ranking.worth.any()


@BOTH
def test_logits_of_16_bits_are_ranked_by_what_they_are(rank, device):
    lanes = Lanes(4, num_lanes=2, kv_heads=2, num_slots=8, max_blocks=90)
    lanes.ring_start = [90, 70]
    logits = random_logits(lanes, [1, 0], 3, 90, 0, None, 4.0).half()
    for found, expected in zip(*(ranked(rank, each, lanes, [1, 0], 20, device) for each in (logits, logits.float()))):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    def arguments():
        lanes = torch.tensor([1, -1], device=device)
        return [torch.zeros(2, 2, 2, 20, 2, device=device), Lanes(0).maps(device).block_slot, lanes, lanes, 3]

    rank_blocks(*arguments())
    for number, wrong in [
        (0, torch.zeros(2, 3, 2, 20, 2, device=device)),
        (0, arguments()[0][:, :, :1].contiguous()),
        (0, arguments()[0].double()),
        (0, torch.zeros(2, 2, 2, 21, 2, device=device)),
        (1, arguments()[1].long()),
        (2, arguments()[2][:1]),
        (3, arguments()[3].int()),
        (4, -1),
    ]:
        changed = arguments()
        changed[number] = wrong
        with pytest.raises(AssertionError):
            rank_blocks(*changed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_past_two_billion_elements_are_ranked(device):
    entries, heads, num_blocks = 2**31 // (2 * 8 * 8192) + 1, 8, 8192
    logits = torch.zeros(entries, 2, 1, num_blocks, heads, device=device)
    logits[-1, :, :, -1] = 20.0
    slots = torch.full((1, 1, num_blocks), -1, dtype=torch.int32, device=device)
    lanes = torch.zeros(entries, dtype=torch.int64, device=device)
    ranking = rank_blocks(logits, slots, lanes, lanes + num_blocks, 1)
    assert ranking.wanted[-1, :, 0].nonzero()[:, 1].tolist() == [num_blocks - 1] * 2
    assert ranking.lacking[-1].item() > 0.99
