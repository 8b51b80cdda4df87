"""Many long requests in pages for two, on a tiny model.

python -m tests.engine.crowd        sixteen of 4,096 tokens, K 12; minutes
"""

import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from minserve.config import BLOCK_SIZE
from minserve.memory.blocks import blocks_for
from tests.engine.tiny import CONFIG, VOCAB, submit, tiny_engine

MODEL = {**CONFIG, "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 8192}
PAGE_BYTES = 3 * 2 * 2 * BLOCK_SIZE * 8 * 4


class Seen(NamedTuple):
    """most_running, most_pages: at any one time; lengths: of the texts, in the order of the requests; gaps: the most
    steps in which each of them, once running, was given no token."""

    num_pages: int
    most_running: int
    most_pages: int
    lengths: list[int]
    gaps: list[int]


def crowd(folder, *, num_requests, num_tokens, num_new, num_slots, check_every=1):
    """All come at once, and sparse they become only where pages are short."""
    max_model_len = num_tokens + num_new + BLOCK_SIZE
    num_pages = 2 * blocks_for(max_model_len)
    engine = tiny_engine(
        folder,
        MODEL,
        sparse="pressure",
        working_set_blocks=num_slots,
        kv_cache_memory=PAGE_BYTES * num_pages,
        host_kv=PAGE_BYTES * num_requests * blocks_for(max_model_len),
        max_model_len=max_model_len,
        max_num_seqs=num_requests,
        max_num_batched_tokens=512,
        run_ahead=1,
    )
    for number in range(num_requests):
        rng = random.Random(number)
        prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
        engine.submit(submit(f"{number}", prompt, max_tokens=num_new, temperature=0.8, seed=number, ignore_eos=True))
    most_running = most_pages = step = 0
    lengths, gaps, last = [0] * num_requests, [0] * num_requests, {}
    while engine.has_work:
        outputs, step = engine.step(), step + 1
        if step % check_every == 0:
            engine.check()
        most_running = max(most_running, outputs.stats.num_running)
        most_pages = max(most_pages, outputs.stats.num_pages_used)
        for delta in outputs.deltas:
            own = int(delta.request_id)
            lengths[own] += len(delta.token_ids)
            gaps[own] = max(gaps[own], step - last.get(own, step))
            last[own] = step
    return Seen(num_pages, most_running, most_pages, lengths, gaps)


def main():
    with tempfile.TemporaryDirectory() as folder:
        size = {"num_requests": 16, "num_tokens": 4096, "num_new": 200, "num_slots": 12}
        seen = crowd(Path(folder), **size, check_every=20)
    print(f"{size}: {seen.most_running} together, in {seen.most_pages} of {seen.num_pages} pages")
    print(
        f"texts of {min(seen.lengths)} to {max(seen.lengths)} tokens; the longest wait for one: {max(seen.gaps)} steps"
    )


if __name__ == "__main__":
    main()
