"""What lies in slots after fetches and retirements, against loops that move one block after the other."""

import pytest
import torch

from minserve.kernels.fetch_blocks import fetch_blocks, fetch_blocks_reference, fetch_blocks_triton
from minserve.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
from minserve.kernels.retire_block import retire_block, retire_block_reference, retire_block_triton
from minserve.kernels.score_blocks import LOOKAHEAD
from minserve.kernels.select_blocks import FetchPlan, SlotMaps

from .working_sets import Lanes, assert_consistent, blocks_of_text, first_wanted, mask, pages_for, victims

STEP, LAYER, LAYERS = 77, 1, 3
RING = 3
BOTH_FETCH = pytest.mark.parametrize("fetch", [fetch_blocks_reference, fetch_blocks_triton])
BOTH_RETIRE = pytest.mark.parametrize("retire", [retire_block_reference, retire_block_triton])


class Case:
    """Lanes with pages and host blocks of random content. content: what the host blocks stand for."""

    def __init__(self, lanes, device, dtype, head_dim=4, is_fp8=False):
        self.lanes, self.device = lanes, device
        shape, columns = (lanes.kv_heads,), lanes.num_slots + RING + 1
        num_blocks = lanes.num_lanes * lanes.max_blocks
        self.page_table = pages_for(lanes.num_lanes, columns, device)
        self.host_table = pages_for(lanes.num_lanes, lanes.max_blocks, device)
        self.kv = blocks_of_text(lanes.num_lanes * columns, *shape, device=device, dtype=dtype, head_dim=head_dim)
        self.host = blocks_of_text(num_blocks, LAYERS, *shape, device=device, dtype=dtype, head_dim=head_dim)
        self.content, self.scales = self.host, None
        if is_fp8:
            sizes = 10.0 ** torch.randint(-3, 4, (*self.host.shape[:4], 1, 1), device=device)
            self.host, self.scales = quantize_blocks((self.host * sizes).to(dtype))
            self.content = dequantize_blocks(self.host, self.scales, dtype)
        self.maps = lanes.maps(device)
        self.step = torch.tensor([STEP], dtype=torch.int32, device=device)
        # What is expected, changed block by block.
        self.expected_kv, self.expected_used = self.kv.clone(), self.maps.slot_used.clone()
        self.expected_block, self.expected_slot = self.maps.slot_block.clone(), self.maps.block_slot.clone()

    def put(self, lane, head, slot, block, content):
        evicted = self.expected_block[lane, head, slot].item()
        if evicted >= 0:
            self.expected_slot[lane, head, evicted] = -1
        self.expected_block[lane, head, slot] = block
        self.expected_slot[lane, head, block] = slot
        self.expected_used[lane, head, slot] = STEP
        self.expected_kv[self.page_table[lane, slot].item(), head] = content

    def fetch(self, fetch, plan, entries):
        """plan: [entries][kv_heads] lists of (block, slot)."""
        cap = max((len(own) for heads in plan for own in heads), default=0) + 1
        padded = [[own + [(-1, -1)] * (cap - len(own)) for own in heads] for heads in plan]
        both = torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(plan), -1, cap, 2).unbind(dim=3)
        blocks, slots = (each.contiguous() for each in both)
        lanes = torch.tensor(entries, device=self.device)
        empty = blocks.new_empty(0)
        sources = (self.host, LAYER, self.host_table, self.kv, self.page_table, self.scales)
        fetch(FetchPlan(blocks, slots, empty), self.maps, lanes, self.step, *sources)

    def retire(self, retire, retiring, wanted, entries):
        lanes, leaving = (torch.tensor(each, device=self.device) for each in (entries, retiring))
        wanted = mask(wanted, self.lanes.max_blocks, self.device)
        # Of every other entry, the other row counts.
        row = torch.arange(len(entries), device=self.device) % 2
        wanted = torch.where(
            (row == LOOKAHEAD)[:, None, None, None],
            *(torch.stack(each, dim=1) for each in ((wanted, ~wanted), (~wanted, wanted))),
        )
        retire(leaving, wanted, row, self.maps, lanes, self.step, self.kv, self.page_table)

    def check(self):
        assert torch.equal(self.kv, self.expected_kv)
        assert torch.equal(self.maps.slot_block, self.expected_block)
        assert torch.equal(self.maps.block_slot, self.expected_slot)
        assert torch.equal(self.maps.slot_used, self.expected_used)
        assert_consistent(self.maps)


def random_plan(lanes, entries):
    """Fetches of blocks that are in no slot into slots that do not hold block 0."""
    plan = []
    for lane in entries:
        heads = []
        for head in range(lanes.kv_heads):
            held = lanes.slot_block[lane][head]
            absent = [block for block in range(1, lanes.start(lane)) if block not in held]
            slots = [slot for slot, block in enumerate(held) if block != 0]
            num = lanes.random.choice([0, 0, 1, 2, 9])
            heads.append(
                list(zip(lanes.random.sample(absent, len(absent)), lanes.random.sample(slots, len(slots))))[:num]
            )
        plan.append(heads if lane >= 0 else [[] for _ in heads])
    return plan


@BOTH_FETCH
@pytest.mark.parametrize("seed", range(20))
def test_fetched_blocks_lie_in_their_slots_and_evicted_ones_nowhere(fetch, seed, device, dtype):
    lanes = Lanes(seed, kv_heads=seed % 3 + 1, num_slots=1 + seed % 7, empty=seed % 2 == 0)
    case, entries = Case(lanes, device, dtype), lanes.entries(3)
    plan = random_plan(lanes, entries)
    for lane, heads in zip(entries, plan):
        for head, own in enumerate(heads):
            for block, slot in own:
                content = case.content[case.host_table[lane, block].item(), LAYER, head]
                case.put(lane, head, slot, block, content)
    case.fetch(fetch, plan, entries)
    case.check()


@BOTH_FETCH
@pytest.mark.parametrize("head_dim", [4, 96, 128])
@pytest.mark.parametrize("pages", [torch.float32, torch.float16], ids=str)
def test_blocks_in_8_bits_are_scaled_and_rounded_to_the_dtype_of_pages(fetch, pages, head_dim, device):
    """Bit by bit as the reference does it."""
    lanes = Lanes(head_dim, kv_heads=3, num_slots=5, empty=False)
    case, entries = Case(lanes, device, pages, head_dim, is_fp8=True), [2, 0, 3]
    plan = random_plan(lanes, entries)
    assert sum(len(own) for heads in plan for own in heads) > 5
    for lane, heads in zip(entries, plan):
        for head, own in enumerate(heads):
            for block, slot in own:
                case.put(lane, head, slot, block, case.content[case.host_table[lane, block].item(), LAYER, head])
    case.fetch(fetch, plan, entries)
    case.check()


@BOTH_FETCH
@pytest.mark.parametrize("entries", [[2, 0], [-1, -1], [-1, 1]])
def test_an_empty_plan_changes_nothing(fetch, entries, device, dtype):
    case = Case(Lanes(4), device, dtype)
    case.fetch(fetch, [[[], []] for _ in entries], entries)
    case.check()


@BOTH_FETCH
def test_a_block_without_a_host_copy_is_not_fetched(fetch, device, dtype):
    lanes = Lanes(0, num_lanes=1, kv_heads=1, num_slots=3)
    lanes.slot_block, lanes.ring_start = [[[0, 1, 2]]], [9]
    case = Case(lanes, device, dtype)
    case.host_table[0, 5] = -1
    case.put(0, 0, 1, 6, case.content[case.host_table[0, 6].item(), LAYER, 0])
    case.fetch(fetch, [[[(5, 2), (6, 1)]]], [0])
    case.check()


@BOTH_FETCH
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_more_fetches_than_programs_look_up_or_copy_at_once(fetch, head_dim, device, dtype):
    lanes = Lanes(5, num_lanes=3, kv_heads=3, num_slots=20, max_blocks=60, empty=False)
    lanes.slot_block, lanes.ring_start = [[list(range(20)) for _ in range(3)] for _ in range(3)], [50] * 3
    case = Case(lanes, device, dtype, head_dim)
    plan = [[list(zip(range(20 + lane, 39 + lane), range(1, 20))) for _ in range(3)] for lane in (2, 0)]
    for lane, heads in zip((2, 0), plan):
        for head, own in enumerate(heads):
            for block, slot in own:
                case.put(lane, head, slot, block, case.content[case.host_table[lane, block].item(), LAYER, head])
    case.fetch(fetch, plan, [2, 0])
    case.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_fp8", [False, True])
def test_blocks_come_from_pinned_memory(is_fp8, device, dtype):
    lanes = Lanes(0, num_lanes=1, kv_heads=2, num_slots=3)
    lanes.slot_block, lanes.ring_start = [[[0, 1, 2]] * 2], [9]
    case = Case(lanes, device, dtype, head_dim=128, is_fp8=is_fp8)
    case.host = case.host.cpu().pin_memory()
    case.put(0, 1, 2, 7, case.content[case.host_table[0, 7].item(), LAYER, 1])
    case.fetch(fetch_blocks, [[[], [(7, 2)]]], [0])
    case.check()


@BOTH_RETIRE
@pytest.mark.parametrize("seed", range(30))
def test_a_block_that_leaves_the_ring_goes_where_it_is_wanted_or_there_is_room(retire, seed, device, dtype):
    lanes = Lanes(seed, kv_heads=seed % 3 + 1, num_slots=1 + seed % 7, empty=seed % 3 == 0)
    case, entries = Case(lanes, device, dtype), lanes.entries(4)
    scores = lanes.ranking(entries, advance=1)
    count = lanes.random.choice([lanes.num_slots - 1, lanes.num_slots - 1, 0, 50])
    wanted = [[first_wanted(own, count) for own in heads] for heads in scores]
    retiring = [lanes.ring_start[lane] if lane >= 0 and lanes.random.random() < 0.8 else -1 for lane in entries]
    for lane, block, heads in zip(entries, retiring, wanted):
        for head, own in enumerate(heads):
            if lane >= 0 and block >= 0:
                slots = lanes.slot_block[lane][head]
                free = victims(slots, lanes.slot_used[lane][head], own)
                if free and (block in own or -1 in slots):
                    page = case.page_table[lane, lanes.num_slots + block % RING].item()
                    case.put(lane, head, free[0], block, case.kv[page, head])
    case.retire(retire, retiring, wanted, entries)
    case.check()


@BOTH_RETIRE
def test_padding_and_lanes_that_keep_their_ring_are_left_alone(retire, device, dtype):
    case = Case(Lanes(1), device, dtype)
    everything = [[set(range(20))] * 2] * 3
    case.retire(retire, [7, -1, -1], everything, [-1, 2, 0])
    case.check()


@BOTH_RETIRE
def test_block_0_is_kept_though_it_is_not_ranked(retire, device, dtype):
    lanes = Lanes(0, num_lanes=1, kv_heads=1, num_slots=1)
    lanes.slot_block, lanes.ring_start = [[[-1]]], [0]
    case = Case(lanes, device, dtype)
    case.put(0, 0, 0, 0, case.kv[case.page_table[0, 1].item(), 0])
    case.retire(retire, [0], [[set()]], [0])
    case.check()


def test_wrong_shapes_and_dtypes_are_our_mistake(device):
    case = Case(Lanes(0), device, torch.float32)
    lanes, retiring = torch.tensor([1], device=device), torch.tensor([-1], device=device)
    wanted, row = torch.zeros(1, 2, 2, 20, dtype=torch.bool, device=device), torch.zeros_like(lanes)
    none = torch.full((1, 2, 4), -1, dtype=torch.int32, device=device)
    plan, (slot_block, slot_used, block_slot) = FetchPlan(none, none, none), case.maps
    rest = (case.kv, case.page_table)
    host8, scales = quantize_blocks(case.host)
    for wrong in (
        (FetchPlan(none, none[:, :, :1], none), case.maps, lanes, case.step, case.host, 0, case.host_table, *rest),
        (plan, case.maps, lanes, case.step, case.host.half(), 0, case.host_table, *rest),
        (plan, case.maps, lanes, case.step, host8, 0, case.host_table, *rest),
        (plan, case.maps, lanes, case.step, case.host, 0, case.host_table, *rest, scales),
        (plan, case.maps, lanes, case.step, host8, 0, case.host_table, *rest, scales[1:]),
        (plan, case.maps, lanes, case.step, case.host, LAYERS, case.host_table, *rest),
        (plan, case.maps, lanes, case.step, case.host, 0, case.host_table[:, :3], *rest),
        (plan, case.maps, lanes, case.step.long(), case.host, 0, case.host_table, *rest),
        (plan, SlotMaps(slot_block, slot_used[:1], block_slot), lanes, case.step, case.host, 0, case.host_table, *rest),
    ):
        with pytest.raises(AssertionError):
            fetch_blocks(*wrong)
    for wrong in (
        (retiring.int(), wanted, row, case.maps, lanes, case.step, *rest),
        (retiring, wanted[:, :1], row, case.maps, lanes, case.step, *rest),
        (retiring, wanted, row.int(), case.maps, lanes, case.step, *rest),
        (retiring, wanted, row, case.maps, lanes, case.step, case.kv, case.page_table[:, :7].contiguous()),
    ):
        with pytest.raises(AssertionError):
            retire_block(*wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pages_and_host_blocks_past_two_billion_elements_are_found(device):
    kv_heads, head_dim, big = 8, 128, 2**31 // (8 * 2 * 16 * 128) + 2
    kv, host = (
        torch.empty(*shape, kv_heads, 2, 16, head_dim, dtype=torch.bfloat16, device=device)
        for shape in ((big,), (big, 1))
    )
    host[-1] = torch.randn(host[-1].shape, device=device)

    def ints(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    maps = SlotMaps(*(torch.full((1, kv_heads, size), -1, dtype=torch.int32, device=device) for size in (1, 1, 4)))
    plan = FetchPlan(ints([[[3]] * kv_heads]), ints([[[0]] * kv_heads]), ints([]))
    table = ints([[big - 1, 0, 1, 2]])
    step, lanes = ints([1]), ints([0], torch.int64)
    fetch_blocks(plan, maps, lanes, step, host, 0, ints([[0, 0, 0, big - 1]]), kv, table)
    assert torch.equal(kv[-1], host[-1, 0])
    assert maps.block_slot[0].tolist() == [[-1, -1, -1, 0]] * kv_heads
