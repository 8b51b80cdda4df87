"""What a GPU does once before it serves: a profile run, and cuDNN's plans.

Owns: the largest step there can be, run on nobody's behalf. Does not know: requests, or how large the KV cache becomes.
"""

from collections.abc import Callable

import torch

from minserve.engine.plan import Chunk, Sample, StepPlan
from minserve.kernels.decode_attention import decode_attention, decode_batch
from minserve.kernels.prefill_attention import flash_attention
from minserve.memory.blocks import blocks_for
from minserve.memory.lanes import Lanes
from minserve.memory.pages import KVPages
from minserve.models.causal_lm import CausalLM
from minserve.runner.attention import KVContext
from minserve.runner.decode import PADDING, Decode
from minserve.runner.prefill import FlashShapes, tile_rows
from minserve.runner.runner import Runner
from minserve.runner.sampler import Sampler
from minserve.spec.draft import Drafter, NoDrafter


@torch.inference_mode()
def workspace_bytes(
    model: CausalLM,
    new_drafter: Callable[[Lanes], Drafter | NoDrafter],
    like: torch.Tensor,
    *,
    num_tokens: int,
    num_lanes: int,
    num_drafts: int,
    shapes: FlashShapes | None,
) -> int:
    """The most memory that steps take on the GPU beside weights and KV: a chunk of num_tokens tokens with a decode of
    num_lanes lanes beside it, and the decode alone, which has its own for its graphs. Both are run to see it.

    like: any tensor of the dtype and on the device of the model.
    """
    config, device = model.config, like.device
    context_len = model.rope_table.shape[0]
    lanes = Lanes(num_lanes, blocks_for(context_len), config.vocab_size, device)
    drafter = new_drafter(lanes)
    pages = KVPages(config, 1, like.dtype, device)  # every block of every lane: what is in it does not matter
    context = KVContext(pages.kv, lanes.page_table, model.rope_table, config.rms_norm_eps, config.num_heads)
    sampler = Sampler(lanes, config.vocab_size, ())
    decode = Decode(model, context, lanes, sampler, drafter)
    runner = Runner(model, context, sampler, decode, decode, drafter, shapes)
    nobody = torch.full((num_lanes,), PADDING, dtype=torch.int64, device=device)
    chunks = _longest_chunks(num_tokens, num_lanes, context_len, at_the_end=shapes is not None)

    def prefill() -> None:
        decodes = [PADDING] * num_lanes
        samples = [Sample(lane=lane, logprobs=0, adjusted=True) for lane in (*(c.lane for c in chunks), *decodes)]
        plan = StepPlan(
            step=0,
            chunks=chunks,
            decodes=decodes,
            num_drafts=num_drafts,
            num_proposals=num_drafts,
            samples=samples,
        )
        runner.run(plan).result()

    def decode_step() -> None:
        aux = decode.new_aux(num_lanes * (1 + num_drafts))
        logits = decode.forward(nobody, num_drafts, aux)
        decode.sample(logits, nobody, adjusted=False)
        decode.propose(aux, *decode.sample(logits, nobody, adjusted=True), nobody, num_drafts)

    rows = num_lanes * (1 + num_drafts)
    kept = lanes.nbytes + drafter.nbytes + rows * config.vocab_size * like.itemsize  # tables, and the graphs' logits
    prefill_bytes, decode_bytes = _peak_bytes(prefill, device), _peak_bytes(decode_step, device)
    # Decodes run once as they stand before they are captured, where prefills run too, and keep their own after that.
    return kept + max(prefill_bytes, decode_bytes) + decode_bytes


def _longest_chunks(num_tokens: int, num_lanes: int, context_len: int, *, at_the_end: bool) -> list[Chunk]:
    """Chunks of num_tokens tokens in all, each as long as a context may be, in as many lanes as there are; at its end,
    where most came before it, or at its beginning."""
    chunks: list[Chunk] = []
    while num_tokens and len(chunks) < num_lanes:
        count = min(num_tokens, context_len)
        start = context_len - count if at_the_end else 0
        chunks.append(Chunk(lane=len(chunks), start=start, token_ids=[0] * count, samples=True))
        num_tokens -= count
    return chunks


@torch.inference_mode()
def compile_tiles(context: KVContext) -> None:
    """Have Triton compile the attention of short chunks now: of one tile, some, and many, which are split into more or
    fewer parts. Reads a page, whoever's it is, and writes nothing."""
    kv, rows = context.kv[0], tile_rows(context.num_heads // context.kv.shape[2])
    for num_tiles in (1, 32, 256):
        q = kv.new_zeros(num_tiles * rows, context.num_heads, kv.shape[-1])
        lanes = torch.zeros(num_tiles, dtype=torch.int64, device=kv.device)
        lengths = torch.ones(num_tiles * rows, dtype=torch.int64, device=kv.device)
        decode_attention(q, kv, decode_batch(context.page_table, lanes, lengths, kv))


@torch.inference_mode()
def plan_shapes(
    shapes: FlashShapes, model: CausalLM, dtype: torch.dtype, max_keys: int, progress: Callable[[int, int], None]
) -> None:
    """Have cuDNN plan every shape now, rather than when somebody waits for it.

    max_keys: tokens of the context. progress: told of (shapes planned, shapes in all).
    """
    config, device = model.config, model.rope_table.device
    wanted = shapes.all(max_keys)
    for number, (rows, keys, causal) in enumerate(wanted, 1):
        q = torch.zeros(rows, config.num_heads, config.head_dim, dtype=dtype, device=device)
        k, v = torch.zeros(2, config.num_kv_heads, keys, config.head_dim, dtype=dtype, device=device)
        flash_attention(q, k, v, causal=causal)
        progress(number, len(wanted))


def _peak_bytes(function: Callable[[], None], device: torch.device) -> int:
    """What torch's allocator held at most in a run of the function, beyond what it holds now."""
    function()  # libraries take their own workspaces, once
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
