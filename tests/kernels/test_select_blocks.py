"""Which blocks are fetched and into which slots, against a straight telling of the rules in loops."""

import pytest
import torch

from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL
from minserve.kernels.select_blocks import select_blocks, select_blocks_reference, select_blocks_triton

from .working_sets import Lanes, first_wanted, mask, victims

BOTH = pytest.mark.parametrize("select", [select_blocks_reference, select_blocks_triton])
# In the interpreter a program takes some 20 ms.
INTERPRETED = 10


def expected_plan(lanes, entries, scores, wanted, normal, allowance, cap):
    """(fetches, counters), by entry and head; fetches: lists of (block, slot)."""
    fetches, counters = [], []
    for entry, lane in enumerate(entries):
        heads = range(lanes.kv_heads)
        if lane < 0 or not lanes.sparse[lane]:
            fetches.append([[] for _ in heads])
            counters.append([[0, 0, 0, 0, 0] for _ in heads])
            continue
        candidates, own, missing = [], [], []
        for head in heads:
            slots = lanes.slot_block[lane][head]
            at_hand = {block for block in slots if block >= 0} | set(range(lanes.ring_start[lane], lanes.max_blocks))
            missed = sorted(wanted[entry][head] - at_hand, key=lambda b: (-scores[entry][head][b], b))
            free = victims(slots, lanes.slot_used[lane][head], wanted[entry][head])
            candidates += [(-scores[entry][head][b], head, b) for b in missed[: min(cap, len(free))]]
            own.append(free)
            asked = normal[entry][head] & set(range(lanes.ring_start[lane]))
            missing.append((len(wanted[entry][head] & set(slots)), missed, len(asked - at_hand), len(asked)))
        admitted = sorted(candidates)[: allowance[lane]]
        chosen = [sorted(block for _, head, block in admitted if head == own_head) for own_head in heads]
        fetches.append([list(zip(chosen[head], sorted(own[head][: len(chosen[head])]))) for head in heads])
        counters.append(
            [[hits, len(missed), len(missed) - len(chosen[h]), *new] for h, (hits, missed, *new) in enumerate(missing)]
        )
    return fetches, counters


def run(select, lanes, entries, scores, wanted, normal, allowance, cap, device, step=77):
    """(fetches, counters, maps), as above, of the operation."""

    def ints(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    maps = lanes.maps(device)
    ring_start = ints([lanes.start(lane) for lane in entries])
    # As they come: one row after the other, and the lookahead row's scores among those of both.
    both_wanted = torch.stack([mask(each, lanes.max_blocks, device) for each in (wanted, normal)], dim=1)
    look_scores = torch.tensor(scores, device=device).view(len(entries), lanes.kv_heads, lanes.max_blocks)
    both_scores = torch.stack((look_scores, torch.full_like(look_scores, torch.nan)), dim=1)
    plan = select(
        both_wanted[:, LOOKAHEAD],
        both_scores[:, LOOKAHEAD],
        both_wanted[:, NORMAL],
        maps,
        ints(entries),
        ints(lanes.sparse, torch.bool),
        ring_start,
        ints(allowance, torch.int32),
        ints([step], torch.int32),
        cap,
    )
    assert plan.blocks.shape == plan.slots.shape == (len(entries), lanes.kv_heads, cap)
    fetches = []
    for blocks, slots in zip(plan.blocks.tolist(), plan.slots.tolist()):
        pairs = [list(zip(*each)) for each in zip(blocks, slots)] if cap else [[] for _ in blocks]
        filled = [[pair for pair in own if pair != (-1, -1)] for own in pairs]
        assert all(own[: len(some)] == some for own, some in zip(pairs, filled)), "a gap before a fetch"
        fetches.append(filled)
    return fetches, plan.counters.tolist(), maps


@pytest.mark.parametrize(
    ("select", "seed"),
    [(select_blocks_reference, seed) for seed in range(40)]
    + [(select_blocks_triton, seed) for seed in range(40 if torch.cuda.is_available() else INTERPRETED)],
)
def test_the_plan_follows_from_the_rules(select, seed, device):
    lanes = Lanes(seed, kv_heads=seed % 3 + 1, num_slots=1 + seed % 8, empty=seed % 2 == 0)
    chance = lanes.random
    entries = lanes.entries(chance.choice([1, 3, 4]))
    # A block more than lies behind the ring is ranked where one is about to leave it.
    scores, other = (lanes.ranking(entries, chance.choice([0, 1]), chance.choice([1, 3, 50])) for _ in range(2))
    count = chance.choice([0, lanes.num_slots - 1, lanes.num_slots, 3 * lanes.max_blocks])
    wanted, normal = ([[first_wanted(own, count) for own in heads] for heads in rows] for rows in (scores, other))
    cap = chance.choice([0, 1, 2, 5, 30])
    allowance = [chance.choice([0, 1, 3, 4, 1000]) for _ in range(lanes.num_lanes)]

    fetches, counters, maps = run(select, lanes, entries, scores, wanted, normal, allowance, cap, device)
    expected = expected_plan(lanes, entries, scores, wanted, normal, allowance, cap)
    assert (fetches, counters) == expected

    used = [[list(own) for own in heads] for heads in lanes.slot_used]
    for entry, lane in enumerate(entries):
        if lane >= 0 and lanes.sparse[lane]:
            for head, slots in enumerate(lanes.slot_block[lane]):
                for slot, block in enumerate(slots):
                    if block in wanted[entry][head]:
                        used[lane][head][slot] = 77
    assert maps.slot_used.tolist() == used
    assert maps.slot_block.tolist() == lanes.slot_block, "a plan changes no map"
    assert maps.block_slot.tolist() == lanes.block_slot(), "a plan changes no map"


@pytest.mark.parametrize(("num_slots", "max_blocks", "cap"), [(60, 300, 6), (33, 130, 33), (128, 1000, 128)])
def test_the_plan_of_many_blocks_and_slots_follows_too(num_slots, max_blocks, cap, device):
    lanes = Lanes(cap, num_lanes=2, kv_heads=3 if max_blocks < 500 else 1, num_slots=num_slots, max_blocks=max_blocks)
    lanes.sparse, lanes.ring_start = [True] * 2, [max_blocks - 3, max_blocks // 2]
    entries = [1, 0] if max_blocks < 500 else [0]
    scores, other = (lanes.ranking(entries, 1, 40) for _ in range(2))
    wanted, normal = (
        [[first_wanted(own, num_slots - 1) for own in heads] for heads in rows] for rows in (scores, other)
    )
    allowance = [cap + cap // 2, 10 * cap]
    fetches, counters, _ = run(select_blocks_triton, lanes, entries, scores, wanted, normal, allowance, cap, device)
    assert (fetches, counters) == expected_plan(lanes, entries, scores, wanted, normal, allowance, cap)
    assert sum(len(own) for own in fetches[-1]) > 0


def one_lane(slots, used, ring_start=15):
    """A lane with these slots in each head."""
    lanes = Lanes(0, num_lanes=1, kv_heads=len(slots), num_slots=len(slots[0]))
    lanes.slot_block, lanes.slot_used, lanes.sparse, lanes.ring_start = [slots], [used], [True], [ring_start]
    return lanes


def with_scores(scores):
    """[1][kv_heads][blocks] from a dict of scores for each head, and what is in them is wanted."""
    return [[[own.get(block, -float("inf")) for block in range(20)] for own in scores]], [[set(own) for own in scores]]


@BOTH
def test_heads_share_an_allowance_by_score_then_head_then_block(select, device):
    lanes = one_lane([[0, 1, 2, 3], [0, 1, 2, 3]], [[0] * 4, [0] * 4])
    scores, wanted = with_scores([{7: 2.0, 9: 5.0, 8: 2.0}, {4: 2.0, 5: 9.0, 6: 8.0}])
    for allowance, blocks in [(0, ([], [])), (2, ([], [5, 6])), (3, ([9], [5, 6])), (4, ([7, 9], [5, 6]))]:
        ((first, second),), counters, _ = run(select, lanes, [0], scores, wanted, wanted, [allowance], 3, device)
        assert ([block for block, _ in first], [block for block, _ in second]) == blocks
        assert [own[2] for own in counters[0]] == [3 - len(own) for own in blocks]


@BOTH
def test_a_head_s_cap_comes_before_the_shares(select, device):
    lanes = one_lane([[0, 1, 2, 3], [0, 1, 2, 3]], [[0] * 4, [0] * 4])
    scores, wanted = with_scores([{7: 9.0, 8: 8.0, 9: 7.0}, {4: 1.0}])
    ((first, second),), _, _ = run(select, lanes, [0], scores, wanted, wanted, [2], 1, device)
    assert ([block for block, _ in first], [block for block, _ in second]) == ([7], [4])


@BOTH
def test_an_entry_may_have_a_cap_of_its_own(select, device):
    """Two entries of one head each, of three misses."""

    def plan(caps):
        lanes = Lanes(0, num_lanes=2, kv_heads=1, num_slots=4, max_blocks=8)
        lanes.slot_block, lanes.ring_start, lanes.sparse = [[[0, -1, -1, -1]]] * 2, [8, 8], [True, True]
        scores = torch.arange(8.0, device=device).expand(2, 1, -1).contiguous()
        wanted = (torch.arange(8, device=device) >= 5).expand(2, 1, -1).contiguous()
        tables = (torch.tensor([True, True], device=device), torch.tensor([8, 8], device=device))
        room, step = torch.tensor([9, 9, 1], dtype=torch.int32, device=device).split([2, 1])
        ids = torch.tensor([0, 1], device=device)
        found = select(wanted, scores, wanted, lanes.maps(device), ids, *tables, room, step, 3, caps)
        return found.blocks.tolist(), found.counters[:, 0, 2].tolist()

    assert plan(None) == ([[[5, 6, 7]], [[5, 6, 7]]], [0, 0])
    assert plan(torch.tensor([1, 2], device=device)) == ([[[7, -1, -1]], [[6, 7, -1]]], [2, 1])


@BOTH
def test_empty_slots_go_first_then_the_longest_unselected_and_the_pinned_block_never(select, device):
    lanes = one_lane([[3, 0, -1, 4, 5, -1]], [[2, 0, 9, 1, 2, 8]])
    scores, wanted = with_scores([dict.fromkeys([4, 7, 8, 9, 10, 11], 1.0)])
    for cap, slots in [(1, [2]), (2, [2, 5]), (3, [0, 2, 5]), (9, [0, 2, 4, 5])]:
        ((fetches,),), counters, _ = run(select, lanes, [0], scores, wanted, wanted, [99], cap, device)
        assert fetches == list(zip([7, 8, 9, 10], slots))
        assert counters == [[[1, 5, 5 - len(slots), 5, 6]]]


@BOTH
def test_what_is_in_the_ring_is_neither_missed_nor_a_surprise(select, device):
    lanes = one_lane([[0, 1, 2]], [[0] * 3], ring_start=5)
    scores, wanted = with_scores([{5: 3.0, 4: 1.0}])
    ((fetches,),), counters, _ = run(select, lanes, [0], scores, wanted, wanted, [9], 2, device)
    assert [block for block, _ in fetches] == [4]
    assert counters == [[[0, 1, 0, 1, 1]]]


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    def arguments():
        maps, table = Lanes(0).maps(device), torch.zeros(4, dtype=torch.int32, device=device)
        lanes = torch.tensor([1], device=device)
        wanted = torch.zeros(1, 2, 20, dtype=torch.bool, device=device)
        return [wanted, wanted.float(), wanted, maps, lanes, table.bool(), lanes, table, table[:1], 2]

    select_blocks(*arguments())
    for number, wrong in [
        (0, arguments()[0][:, :1]),
        (1, arguments()[1].double()),
        (4, arguments()[4].int()),
        (5, arguments()[5].int()),
        (7, arguments()[7].long()),
        (8, arguments()[7]),
        (9, -1),
        (0, torch.zeros(1, 20, 2, dtype=torch.bool, device=device).transpose(1, 2)),
    ]:
        changed = arguments()
        changed[number] = wrong
        with pytest.raises(AssertionError):
            select_blocks(*changed)
