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
