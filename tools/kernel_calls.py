"""Calls of every Triton wrapper in kernels/, at the shapes of production: for two models, two dtypes, some batch sizes.

Tensors are torch's "meta" ones, which have shapes but no memory, so the calls are for compile_kernels.py alone. A new
kernel needs a call here.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels.accept_drafts import Limits, accept_drafts_triton
from minserve.kernels.adjust_logits import Adjustments, adjust_logits_triton, count_tokens_triton
from minserve.kernels.build_digests import Digests, build_digests_triton, digest_shapes
from minserve.kernels.decode_attention import DecodeBatch, decode_attention_triton
from minserve.kernels.fetch_accounts import Accounts, Outcome, count_fetches_triton, take_given_triton
from minserve.kernels.fetch_blocks import fetch_blocks_triton
from minserve.kernels.flags import record_flag, wait_for_flag
from minserve.kernels.fp8 import FP8, quantize_rows_triton
from minserve.kernels.gather_pages import gather_keys_triton
from minserve.kernels.keep_queries import Keep
from minserve.kernels.linear import (
    LINEAR_CHOICES,
    MAX_ROWS,
    SILU_MUL_CHOICES,
    Tile,
    choose_tile,
    linear_silu_mul_triton,
    linear_triton,
)
from minserve.kernels.merge_attention import merge_attention_triton
from minserve.kernels.norm_rope_store import norm_rope_store_triton
from minserve.kernels.rank_blocks import rank_blocks_triton
from minserve.kernels.retire_block import retire_block_triton
from minserve.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from minserve.kernels.sampling import SamplingState, draw_triton
from minserve.kernels.score_blocks import LOOKAHEAD, NORMAL, empty_logits, score_blocks_triton
from minserve.kernels.score_keys import score_keys_triton
from minserve.kernels.select_blocks import FetchPlan, SlotMaps, select_blocks_triton
from minserve.kernels.silu_mul import silu_mul_triton
from minserve.kernels.sparse_rows import RING, LaneTables, begin_rows_triton
from minserve.kernels.step_inputs import step_inputs_triton
from minserve.kernels.store_blocks import store_blocks_triton
from minserve.protocol import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

ROWS = (1, 64, 256)
ROWS_PER_ENTRY = (1, 4)
TILE_ROWS = 16
"""Of short chunks' attention."""
LANES, PAGES, LAYERS, EPS = 256, 1024, 36, 1e-6
MAX_DRAFTS, DRAFT_VOCAB = 8, 32000
SLOTS, CAPS, RANKED_BLOCKS, LONG_BLOCKS = 128, (6, 128), 1024, 2048
"""Of working sets: K, what one head may fetch, and blocks that a step may rank."""
LISTED = 256
"""Blocks of a shortlist."""
EXAMPLE_TILES = (
    Tile(8, 64, 4, 3, tensor_cores=False),
    Tile(8, 64, 4, 3, tensor_cores=False, ahead=1),
    Tile(64, 64, 4, 4),
    Tile(64, 64, 4, 4, ahead=1),
    Tile(64, 32, 4, 4, splits=2),
)
"""Beside those of linear.py's tables: every kernel of it, at block sizes that divide every `in` below."""

Call = Callable[[], object]


class Model(NamedTuple):
    name: str
    hidden: int
    mlp: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    max_blocks: int
    has_norms: bool


QWEN3_8B = Model("Qwen3-8B", 4096, 12288, 151936, 32, 8, 128, 40960 // BLOCK_SIZE, True)
SMOLLM2_135M = Model("SmolLM2-135M", 576, 1536, 49152, 9, 3, 64, 8192 // BLOCK_SIZE, False)


class Work(NamedTuple):
    """What the calls are made for."""

    model: Model
    dtype: torch.dtype
    rows: int

    def floats(self, *shape: int) -> torch.Tensor:
        return empty(*shape, dtype=self.dtype)


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def elementwise_calls(work: Work) -> Iterator[Call]:
    model, rows = work.model, work.rows
    x, weight = work.floats(rows, model.hidden), work.floats(model.hidden)
    yield lambda: rms_norm_triton(x, weight, EPS)
    yield lambda: add_rms_norm_triton(x, torch.empty_like(x), weight, EPS)
    yield lambda: silu_mul_triton(work.floats(rows, 2 * model.mlp))
    qkv = work.floats(rows, model.heads + 2 * model.kv_heads, model.head_dim)
    angles = empty(rows, 1, model.head_dim, dtype=torch.float32)
    norms = (work.floats(model.head_dim), work.floats(model.head_dim)) if model.has_norms else None
    arguments = (qkv, norms, EPS, (angles, angles), pages(work), empty(rows))
    yield functools.partial(norm_rope_store_triton, *arguments)
    table = empty(LANES, model.max_blocks, dtype=torch.int32)
    numbers = (empty(LANES), empty(LANES, MAX_DRAFTS), empty(LANES), empty(LANES))
    for per_entry in ROWS_PER_ENTRY:
        lanes = empty(max(1, rows // per_entry))
        yield functools.partial(step_inputs_triton, *numbers, table, lanes, per_entry - 1, BLOCK_SIZE)
        keep = Keep(lanes, lanes, work.floats(LANES, 2, model.heads, model.head_dim))
        yield functools.partial(norm_rope_store_triton, *arguments, keep=keep)
    for size in (model.hidden, model.mlp, BLOCK_SIZE * model.head_dim):
        yield functools.partial(quantize_rows_triton, work.floats(rows, size))


def pages(work: Work) -> torch.Tensor:
    return work.floats(PAGES, work.model.kv_heads, 2, BLOCK_SIZE, work.model.head_dim)


def attention_calls(work: Work) -> Iterator[Call]:
    model, rows = work.model, work.rows
    table = empty(LANES, model.max_blocks, dtype=torch.int32)
    tiles = (TILE_ROWS,) if work.dtype == torch.bfloat16 else ()  # in float32 prompts are attended with masks
    for per_entry in (*ROWS_PER_ENTRY, *tiles):
        entries = max(1, rows // per_entry)
        q = work.floats(entries * per_entry, model.heads, model.head_dim)
        ended = empty(entries * model.kv_heads, dtype=torch.int32)
        batch = DecodeBatch(table, empty(entries), empty(entries * per_entry), None, ended)
        yield functools.partial(decode_attention_triton, q, pages(work), batch)
    k = work.floats(model.kv_heads, rows * BLOCK_SIZE, model.head_dim)
    yield lambda: gather_keys_triton(pages(work), table[0], rows - 1, k, torch.empty_like(k), rows)
    outs = [work.floats(2 * rows, model.heads, model.head_dim)] * 3
    yield lambda: merge_attention_triton(outs, empty(3, model.heads, 2 * rows, dtype=torch.float32))


def linear_calls(work: Work) -> Iterator[Call]:
    """The chosen tiles for each projection, and the examples."""
    model, rows = work.model, min(work.rows, MAX_ROWS)
    attended = model.heads * model.head_dim
    projections = (
        (model.hidden, attended + 2 * model.kv_heads * model.head_dim),
        (attended, model.hidden),
        (model.hidden, 2 * model.mlp),
        (model.mlp, model.hidden),
        (model.hidden, model.vocab),
    )
    for size_in, size_out in projections:
        x, weight = work.floats(rows, size_in), work.floats(size_out, size_in)
        chosen = choose_tile(LINEAR_CHOICES, rows, size_in, size_out) if work.dtype == torch.bfloat16 else None
        for tile in (*filter(None, [chosen]), *EXAMPLE_TILES):
            if rows > 1 and not tile.tensor_cores:
                continue
            yield functools.partial(linear_triton, x, weight, None, tile)
            if tile.splits > 1:
                yield functools.partial(linear_triton, x, weight, work.floats(size_out), tile)
    x, weight = work.floats(rows, model.hidden), work.floats(2 * model.mlp, model.hidden)
    fused = choose_tile(SILU_MUL_CHOICES, rows, model.hidden, model.mlp)
    if fused is not None and work.dtype == torch.bfloat16:  # as `linear` chooses
        yield functools.partial(linear_silu_mul_triton, x, weight, None, fused)
    yield functools.partial(linear_silu_mul_triton, x, weight, None, EXAMPLE_TILES[2])


def working_set_calls(work: Work) -> Iterator[Call]:
    """A layer's ranking, selection, fetches and retirement, and what is done once a step."""
    model, entries = work.model, work.rows
    kv, host = pages(work), work.floats(PAGES, LAYERS, model.kv_heads, 2, BLOCK_SIZE, model.head_dim)
    shapes = digest_shapes(model.kv_heads, model.head_dim)
    digests = Digests(*(empty(PAGES, *shape, dtype=own) for shape, own in zip(shapes, (FP8, torch.uint8))))
    lanes, of_lane = empty(entries), empty(LANES, dtype=torch.int32)
    sparse, step = empty(LANES, dtype=torch.bool), empty(1, dtype=torch.int32)
    table, host_table = (empty(LANES, columns, dtype=torch.int32) for columns in (SLOTS + RING, model.max_blocks))
    sizes = (SLOTS, SLOTS, model.max_blocks)
    maps = SlotMaps(*(empty(LANES, model.kv_heads, size, dtype=torch.int32) for size in sizes))
    yield functools.partial(build_digests_triton, kv, digests, lanes, lanes)
    tables, given = LaneTables(empty(LANES), empty(LANES), sparse, sparse, empty(LANES)), empty(4, entries)
    for per_entry in ROWS_PER_ENTRY:
        rows = empty(entries * per_entry)
        yield functools.partial(begin_rows_triton, rows, rows, host_table, tables, lanes, given, SLOTS, BLOCK_SIZE)
    queries = work.floats(entries, 2, model.heads, model.head_dim)
    ranked = host_table[:, :RANKED_BLOCKS]
    yield functools.partial(score_blocks_triton, queries, digests.extremes, ranked, lanes, lanes)
    num_blocks = min(RANKED_BLOCKS, model.max_blocks)
    logits = empty_logits(queries, model.kv_heads, num_blocks)
    shortlist = empty(entries, model.kv_heads, LISTED, dtype=torch.int32)
    yield functools.partial(score_keys_triton, queries, digests, ranked, lanes, shortlist, logits)
    yield functools.partial(rank_blocks_triton, logits, maps.block_slot, lanes, lanes, SLOTS - 1)
    if model.max_blocks > RANKED_BLOCKS:  # a large group, and twice as many
        logits = empty_logits(work.floats(entries, 2, 8 * model.kv_heads, model.head_dim), model.kv_heads, LONG_BLOCKS)
        block_slot = empty(LANES, model.kv_heads, LONG_BLOCKS, dtype=torch.int32)
        yield functools.partial(rank_blocks_triton, logits, block_slot, lanes, lanes, SLOTS - 1)
    wanted = empty(entries, 2, model.kv_heads, num_blocks, dtype=torch.bool)
    ranking = (wanted[:, LOOKAHEAD], wanted[:, LOOKAHEAD].float().contiguous(), wanted[:, NORMAL])
    for cap, caps in product(CAPS, (None, lanes)):
        yield functools.partial(select_blocks_triton, *ranking, maps, lanes, sparse, lanes, of_lane, step, cap, caps)
    plan = FetchPlan(*(empty(entries, model.kv_heads, size, dtype=torch.int32) for size in (CAPS[0], CAPS[0], 5)))
    fetch = functools.partial(fetch_blocks_triton, plan, maps, lanes, step)
    yield functools.partial(fetch, host, 1, host_table, kv, table)
    scales = empty(*host.shape[:4], dtype=torch.float32)
    yield functools.partial(fetch, host.to(FP8), 1, host_table, kv, table, scales)
    yield functools.partial(retire_block_triton, lanes, wanted, lanes, maps, lanes, step, kv, table)
    allowance, late = empty(LAYERS, LANES, dtype=torch.int32), empty(LANES + 1)
    since_retry = empty(LANES, dtype=torch.int32)
    accounts = Accounts(empty(2, LANES), empty(LANES), allowance, empty(LANES).float(), since_retry, late)
    yield functools.partial(take_given_triton, given, accounts, step, empty(7, entries), step)
    counters, outcome = plan.counters.expand(LAYERS, *plan.counters.shape), Outcome(lanes.bool(), empty(entries, 5))
    yield functools.partial(count_fetches_triton, counters, counters.float(), lanes, accounts, outcome)
    cache = work.floats(LAYERS, PAGES, model.kv_heads, 2, BLOCK_SIZE, model.head_dim)
    yield functools.partial(store_blocks_triton, cache, host, lanes, lanes)
    yield functools.partial(record_flag, empty(1), empty(1))
    yield functools.partial(wait_for_flag, empty(1), empty(1))


def sampling_calls(work: Work) -> Iterator[Call]:
    number, integer = empty(LANES, dtype=torch.float32), empty(LANES)
    allowed = empty(work.model.vocab, dtype=torch.bool)
    state = SamplingState(
        temperature=number,
        top_p=number,
        min_p=number,
        top_k=integer,
        seed=empty(LANES, 2),
        num_tokens=integer,
    )
    adjustments = Adjustments(
        num_tokens=integer,
        min_position=integer,
        end_ids=empty(LANES, MAX_STOP_TOKEN_IDS),
        bias_ids=empty(LANES, MAX_LOGIT_BIAS),
        bias=empty(LANES, MAX_LOGIT_BIAS, dtype=torch.float32),
        repetition=number,
        presence=number,
        frequency=number,
        prompt_seen=empty(LANES, work.model.vocab, dtype=torch.bool),
        output_counts=empty(LANES, work.model.vocab, dtype=torch.int32),
        drafts=empty(LANES, MAX_DRAFTS),
        constrained=empty(LANES, dtype=torch.bool),
        allowed=empty(LANES, 1 + MAX_DRAFTS, -(-work.model.vocab // 32), dtype=torch.int32),
    )
    penalized = empty(LANES, dtype=torch.bool)
    for per_entry in ROWS_PER_ENTRY:
        lanes = empty(max(1, work.rows // per_entry))
        tokens = empty(len(lanes) * per_entry)
        logits = work.floats(len(tokens), work.model.vocab)
        yield functools.partial(draw_triton, logits, lanes, state, allowed)
        # What has been adjusted is float32.
        yield functools.partial(draw_triton, logits.float(), lanes, state, allowed)
        yield functools.partial(draw_triton, logits, lanes, state)
        yield functools.partial(adjust_logits_triton, logits, lanes, adjustments)
        limits = Limits(torch.empty_like(lanes, dtype=torch.bool), penalized, integer)
        for own in (None, limits):
            yield functools.partial(accept_drafts_triton, tokens, lanes, adjustments.drafts, integer, integer, own)
        yield functools.partial(count_tokens_triton, tokens, lanes, lanes, adjustments.output_counts, penalized)
    lanes = empty(work.rows)
    for vocab, id_offsets in ((work.model.vocab, None), (DRAFT_VOCAB, empty(DRAFT_VOCAB))):
        logits = work.floats(work.rows, vocab)
        for ahead in (0, 1, 2):
            options = {"ahead": ahead, "id_offsets": id_offsets, "filtered": False}
            yield functools.partial(draw_triton, logits, lanes, state, **options)


def production_calls() -> Iterator[tuple[str, Call]]:
    """(what it is, a call); the first of each kernel is the one that matters most."""
    for model in (QWEN3_8B, SMOLLM2_135M):
        for dtype in (torch.bfloat16, torch.float32):
            for rows in ROWS:
                for calls in (elementwise_calls, attention_calls, linear_calls, working_set_calls, sampling_calls):
                    for call in calls(Work(model, dtype, rows)):
                        yield f"{calls.__name__}, {model.name}, {dtype}, {rows} rows", call
