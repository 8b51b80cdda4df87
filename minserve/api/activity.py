"""A line every ten seconds while there is work: what the engine does, in numbers.

Does not know: requests; it reads the engine's counters only.
"""

import asyncio
import copy
import logging
from collections.abc import Callable

from minserve.protocol import Stats

logger = logging.getLogger("minserve")

INTERVAL_S = 10.0


def activity_line(before: Stats, now: Stats, seconds: float) -> str | None:
    """What has been done between two readings; None if nothing has and nothing runs."""
    prompt = now.prompt_tokens - before.prompt_tokens
    generated = now.generation_tokens - before.generation_tokens
    if not (prompt or generated or now.num_running or now.num_waiting):
        return None
    queries = now.prefix_queries_tokens - before.prefix_queries_tokens
    hits = now.prefix_hits_tokens - before.prefix_hits_tokens
    drafts = now.num_drafts - before.num_drafts
    accepted = sum(now.accepted_at) - sum(before.accepted_at)
    return (
        f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
        f"running {now.num_running}, waiting {now.num_waiting}, "
        f"KV {100 * now.num_pages_used / max(1, now.num_pages):.1f}%, "
        f"prefix hits {100 * hits / max(1, queries):.1f}%"
        + (f", host KV {100 * now.num_host_blocks_used / now.num_host_blocks:.1f}%" if now.num_host_blocks else "")
        + (f", {1 + accepted / drafts:.2f} tokens a step with drafts" if drafts else "")
        + _sparse_part(before, now, seconds)
    )


def _sparse_part(before: Stats, now: Stats, seconds: float) -> str:
    """What working sets have done; nothing if there was none. The link's rate is that of what was fetched: what is
    stored goes the other way, and is a sixteenth of a block a token."""
    if not now.num_sparse and now.sparse_steps == before.sparse_steps:
        return ""
    hits, misses = now.sparse_hits - before.sparse_hits, now.sparse_misses - before.sparse_misses
    asked, surprises = now.sparse_asked - before.sparse_asked, now.sparse_surprises - before.sparse_surprises
    rate, unit = (now.bytes_fetched - before.bytes_fetched) / seconds / 1e6, "MB/s"
    if rate >= 1000:
        rate, unit = rate / 1000, "GB/s"
    return (
        f", sparse {now.num_sparse}"
        + (f", hits {100 * hits / (hits + misses):.1f}%" if hits + misses else "")
        + (f", surprises {100 * surprises / asked:.1f}%" if asked else "")
        + f", link {rate:.1f} {unit}"
    )


async def log_activity(read: Callable[[], Stats]) -> None:
    """Log the line for ever."""
    loop = asyncio.get_running_loop()
    # A copy, since an engine may count on in the same object.
    before, since = copy.deepcopy(read()), loop.time()
    warned = False
    while True:
        await asyncio.sleep(INTERVAL_S)
        now, at = copy.deepcopy(read()), loop.time()
        line = activity_line(before, now, at - since)
        if line is not None:
            logger.info(line)
        before, since = now, at
        if not warned and now.num_drafts > 1000 and sum(now.accepted_at) < 0.1 * now.num_drafts:
            warned = True
            logger.warning("hardly any draft is right: is the draft head one for this model?")
