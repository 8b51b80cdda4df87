"""What a GPU does once before it serves: a profile run, and cuDNN's plans.

Owns: the largest step there can be, run on nobody's behalf. Does not know: requests, or how large the KV cache becomes.
"""

from collections.abc import Callable

import torch

from minserve.engine.plan import Chunk
from minserve.kernels.prefill_attention import flash_attention
from minserve.memory.blocks import blocks_for
from minserve.memory.lanes import Lanes
from minserve.memory.pages import KVPages
from minserve.models.causal_lm import CausalLM
from minserve.runner.attention import KVContext
from minserve.runner.decode import PADDING, Decode
from minserve.runner.prefill import FlashShapes, PrefillAttention
from minserve.runner.sampler import Sampler


@torch.inference_mode()
def workspace_bytes(
    model: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_tokens: int,
    num_rows: int,
    shapes: FlashShapes | None,
) -> int:
    """The most memory that steps take on the GPU beside weights and KV: a chunk of num_tokens tokens, of which num_rows
    may yield tokens, and a decode step of num_rows rows, which has its own for its graphs. Both are run to see it."""
    config = model.config
    lanes = Lanes(num_rows, blocks_for(num_tokens), config.vocab_size, device)
    pages = KVPages(config, blocks_for(num_tokens), dtype, device)
    lanes.page_table[:] = torch.arange(pages.num_pages, dtype=torch.int32, device=device)
    context = KVContext(pages.kv, lanes.page_table, model.rope_table, config.rms_norm_eps)
    sampler = Sampler(lanes, config.vocab_size, ())
    decode = Decode(model, context, lanes, sampler)
    nobody = torch.full((num_rows,), PADDING, dtype=torch.int64, device=device)

    def prefill() -> None:
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        chunk = Chunk(lane=0, start=0, token_ids=[0] * num_tokens, samples=True)
        hidden = model(token_ids, PrefillAttention(context, [chunk], shapes))[:num_rows]
        sampler.sample(model.logits(hidden), nobody[: len(hidden)], adjusted=True)

    def decode_step() -> None:
        decode.sample(decode.forward(nobody), nobody, adjusted=True)

    kept = lanes.nbytes + num_rows * config.vocab_size * dtype.itemsize  # the tables, and the graphs' logits
    return kept + _peak_bytes(prefill, device) + _peak_bytes(decode_step, device)


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
