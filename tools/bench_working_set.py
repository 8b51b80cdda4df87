"""The background of a layer, a part of tools/bench_kernels.py: 96 lanes of 16K tokens, K 128, C 6, Qwen3-8B's heads;
and, by itself, what ranks and selects in a group of layers, with what else its kernels' constants and inputs may be.

The worst case: slots hold blocks at random, the ranking is random, so every head misses most of what it wants and takes
C blocks. Beside each time stands the least that it can be: what is read and written at the GPU's bandwidth, or what
goes over the link at the link's.
"""

import functools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from kernel_clock import DEVICE, DTYPE, READ_TB_S, Call, Clock, random

LANES, CONTEXT, BLOCK, SLOTS, CAP = 96, 16384, 16, 128, 6
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 36
HOST_BLOCKS, STORED_PAGES, LINK_TB_S = 1792, 96, 0.055
BLOCKS, HEAD_BYTES = CONTEXT // BLOCK, 2 * BLOCK * HEAD_DIM * 2
GROUPS = ((5 * 134, 1024), (5, 2048))
"""(lanes of 5 layers, blocks): of 134 requests of 16K tokens, and of one of 32K."""

Knobs = tuple[ModuleType, tuple[dict[str, int], ...]]


class Part(NamedTuple):
    """call: of the defaults; knobs: constants of a module and what else they may be; least_us: see above."""

    name: str
    call: Call
    num_bytes: float
    least_us: float
    knobs: Knobs | None = None


def on_device(num_bytes: float) -> tuple[float, float]:
    return num_bytes, num_bytes / READ_TB_S / 1e6


def over_link(num_bytes: float) -> tuple[float, float]:
    return num_bytes, num_bytes / LINK_TB_S / 1e6


def ints(*shape: int, end: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(end, shape, dtype=dtype, device=DEVICE)


def random_maps(lanes: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """slot_block, slot_used, block_slot: block 0 and others behind the ring."""
    shape = (lanes, KV_HEADS)
    others = 1 + torch.rand(*shape, blocks - 4, device=DEVICE).argsort(dim=-1)[..., : SLOTS - 1]
    slot_block = torch.cat((torch.zeros_like(others[..., :1]), others), dim=-1)
    return slot_block.int(), ints(*shape, SLOTS, end=1000), inverse_of(slot_block, blocks)


def inverse_of(slot_block: torch.Tensor, blocks: int) -> torch.Tensor:
    slots = torch.arange(SLOTS, dtype=torch.int32, device=DEVICE).expand_as(slot_block)
    return slots.new_full((*slots.shape[:2], blocks), -1).scatter_(2, slot_block, slots)


WIDTHS = tuple({"NUMBERS_PER_WARP": number} for number in (128, 256, 512, 1024))
TILES = ((64, 4, 512), (128, 4, 512), (128, 8, 512), (256, 8, 512), (128, 4, 1024))
KEYS = ((8, 1, 3, 8192), (8, 1, 4, 8192), (8, 1, 2, 2560), (8, 1, 2, 20480), (16, 2, 2, 8192))
LOGITS = tuple({"NUMBERS_PER_WARP": 4 * width["NUMBERS_PER_WARP"]} for width in WIDTHS)


def knobs(values: Sequence[tuple[int, ...]], *names: str) -> tuple[dict[str, int], ...]:
    return tuple(dict(zip(names, own, strict=True)) for own in values)


def random_digests(count: int) -> Any:
    from minserve.kernels.build_digests import empty_digests

    digests = empty_digests((count,), KV_HEADS, HEAD_DIM, DTYPE, torch.device(DEVICE))
    least = random(count, KV_HEADS, 1, HEAD_DIM // 2)
    digests.extremes.copy_(torch.cat((least, least + 2), dim=2))
    digests.keys.random_(0, 256)
    return digests


def ranking_parts(lanes: torch.Tensor, start: torch.Tensor, maps: Any) -> Iterator[tuple[Part, Any]]:
    """Of all stages up to the selection, and what comes out."""
    from minserve.kernels import rank_blocks, score_blocks, score_keys, select_blocks, shortlist_blocks
    from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL

    blocks, step = maps.block_slot.shape[2], ints(1, end=1)
    queries, places = random(len(lanes), 2, HEADS, HEAD_DIM), len(lanes) * blocks
    digests, table = random_digests(places), torch.randperm(places, device=DEVICE).int().view(len(lanes), blocks)
    score = functools.partial(score_blocks.score_blocks, queries, digests.extremes, table, lanes, start)
    logits = score()
    bounds = on_device(1.0 * digests.extremes.nbytes + logits.nbytes)
    yield Part("score_blocks", score, *bounds, (score_blocks, knobs(TILES, "TILE", "NUM_WARPS", "PROGRAMS"))), logits

    count = min(shortlist_blocks.shortlist_length(SLOTS), blocks)
    whole = logits.clone()  # what is not listed is ranked no more

    def shortlist() -> torch.Tensor:
        logits.copy_(whole)
        return shortlist_blocks.shortlist_blocks(logits, count)

    listed = shortlist()
    bounds = on_device(4.0 * logits.nbytes)
    yield Part("shortlist_blocks, and a copy of logits", shortlist, *bounds, (shortlist_blocks, LOGITS)), listed
    keys = functools.partial(score_keys.score_keys, queries, digests, table, lanes, listed, logits)
    num_bytes = 1.0 * listed.numel() / places / KV_HEADS * (digests.extremes.nbytes + digests.keys.nbytes)
    yield (
        Part(
            "score_keys",
            keys,
            *on_device(num_bytes),
            (score_keys, knobs(KEYS, "TILE", "NUM_WARPS", "NUM_STAGES", "PROGRAMS")),
        ),
        0,
    )
    rank = functools.partial(rank_blocks.rank_blocks, logits, maps.block_slot, lanes, start, SLOTS - 1)
    num_bytes = 1.0 * logits.nbytes + (3 + 2 * 4 + 4.0) * maps.block_slot.numel()
    scores, wanted, *_ = rank()
    yield Part("rank_blocks", rank, *on_device(num_bytes), (rank_blocks, LOGITS)), wanted
    ranking = (wanted[:, LOOKAHEAD], scores, wanted[:, NORMAL])
    allowance = torch.full((len(lanes),), KV_HEADS * CAP, dtype=torch.int32, device=DEVICE)
    # As a step does: slots for all that may be wanted, and a cap for each lane.
    tables = (maps, lanes, lanes >= 0, start, allowance, step, SLOTS, torch.full_like(start, CAP))
    select = functools.partial(select_blocks.select_blocks, *ranking, *tables)
    bounds = on_device(10.0 * maps.block_slot.numel())
    yield Part("select_blocks", select, *bounds, (select_blocks, WIDTHS)), select()


def group_parts(lanes: int, blocks: int) -> Iterator[Part]:
    """Of a group of layers: all stages, and a selection of 4 blocks a head, not cut."""
    from minserve.kernels import select_blocks
    from minserve.kernels.slots import SlotMaps

    ids, start = torch.arange(lanes, device=DEVICE), torch.full((lanes,), blocks - 3, device=DEVICE)
    maps = SlotMaps(*random_maps(lanes, blocks))
    for part, _ in ranking_parts(ids, start, maps):
        yield part
    wanted, scores, normal, _, *tables = part.call.args
    held = scores.topk(SLOTS + 3, dim=-1).indices[..., 3:]
    held[..., 0] = 0
    few = SlotMaps(held.int().contiguous(), maps.slot_used, inverse_of(held, blocks))
    few_call = functools.partial(select_blocks.select_blocks, wanted, scores, normal, few, *tables)
    yield part._replace(name="select_blocks, few", call=few_call)


def layer_parts() -> Iterator[Part]:
    from minserve.kernels import fetch_blocks
    from minserve.kernels.retire_block import retire_block
    from minserve.kernels.score_blocks import LOOKAHEAD
    from minserve.kernels.slots import SlotMaps
    from minserve.kernels.sparse_rows import RING

    lanes, start = torch.arange(LANES, device=DEVICE), torch.full((LANES,), BLOCKS - 3, device=DEVICE)
    maps, step = SlotMaps(*random_maps(LANES, BLOCKS)), ints(1, end=1)
    parts, (*_, wanted, plan) = zip(*ranking_parts(lanes, start, maps))
    yield from parts

    page_table = torch.randperm(LANES * (SLOTS + RING), device=DEVICE).int().view(LANES, -1)
    kv = random(page_table.numel(), KV_HEADS, 2, BLOCK, HEAD_DIM)
    host = torch.empty(HOST_BLOCKS, LAYERS, *kv.shape[1:], dtype=DTYPE, pin_memory=True)
    sources = (host, 1, ints(LANES, BLOCKS, end=HOST_BLOCKS), kv, page_table)
    fetch = functools.partial(fetch_blocks.fetch_blocks, plan, maps, lanes, step, *sources)
    fetched = int((plan.blocks >= 0).sum())
    programs = tuple({"PROGRAMS": number} for number in (16, 48, 64, 128))
    yield Part(f"fetch_blocks: {fetched}", fetch, *over_link(1.0 * fetched * HEAD_BYTES), (fetch_blocks, programs))
    nothing = plan._replace(blocks=torch.full_like(plan.blocks, -1))
    yield Part("fetch_blocks: 0", functools.partial(fetch_blocks.fetch_blocks, nothing, *fetch.args[1:]), 0, 0)
    row = torch.full_like(start, LOOKAHEAD)
    for retiring in (start, torch.full_like(start, -1)):
        num_retired = int((retiring >= 0).sum())
        retire = functools.partial(retire_block, retiring, wanted, row, maps, lanes, step, kv, page_table)
        yield Part(f"retire_block: {num_retired}", retire, *on_device(2.0 * num_retired * KV_HEADS * HEAD_BYTES))


def step_parts() -> Iterator[Part]:
    """What is done once for all layers, or when blocks are full."""
    from minserve.kernels import store_blocks
    from minserve.kernels.build_digests import build_digests

    cache = random(LAYERS, STORED_PAGES, KV_HEADS, 2, BLOCK, HEAD_DIM)
    host = torch.empty(HOST_BLOCKS, *cache[:, 0].shape, dtype=DTYPE, pin_memory=True)
    pages = torch.arange(STORED_PAGES, device=DEVICE)
    hosts = torch.randperm(HOST_BLOCKS, device=DEVICE)[:STORED_PAGES]
    store = functools.partial(store_blocks.store_blocks, cache, host, pages, hosts)
    sizes = tuple(
        {"PROGRAMS": programs, "NUM_WARPS": warps} for programs, warps in ((16, 4), (32, 1), (64, 1), (64, 4))
    )
    yield Part(f"store_blocks: {STORED_PAGES}", store, *over_link(2.0 * cache.numel()), (store_blocks, sizes))
    digests = random_digests(STORED_PAGES)
    build = functools.partial(build_digests, cache[0], digests, pages, pages)
    yield Part(f"build_digests: {STORED_PAGES}", build, *on_device(1.0 * cache[0].numel()))


def bench(clock: Clock, parts: Iterator[Part]) -> tuple[float, float]:
    """Of the defaults: microseconds of all parts, and the least."""

    def time_us(part: Part, values: dict[str, int]) -> float:
        return clock.time_us([part.call], work=part.name, variant=str(values), num_bytes=part.num_bytes)

    sum_us, sum_least_us = 0.0, 0.0
    for part in parts:
        us = time_us(part, {})
        sum_us, sum_least_us = sum_us + us, sum_least_us + part.least_us
        print(f"{part.name:20} {us:9.2f} us   least {part.least_us:9.2f} us", flush=True)
        for values in part.knobs[1] if part.knobs else ():
            with mock.patch.multiple(part.knobs[0], **values):
                print(f"{'':20} {time_us(part, values):9.2f} us   {values}", flush=True)
    return sum_us, sum_least_us


def bench_working_set(clock: Clock) -> None:
    us, least_us = bench(clock, layer_parts())
    print(f"{LAYERS} layers one after the other: {us * LAYERS / 1e3:.2f} ms, least {least_us * LAYERS / 1e3:.2f} ms")
    torch.cuda.empty_cache()
    bench(clock, step_parts())


def bench_ranking(clock: Clock) -> None:
    for lanes, blocks in GROUPS:
        print(f"{lanes} lanes of {blocks} blocks")
        bench(clock, group_parts(lanes, blocks))
        torch.cuda.empty_cache()
