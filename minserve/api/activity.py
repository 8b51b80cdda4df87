"""A line every ten seconds while there is work: what the engine does, in numbers.

Does not know: requests; it reads the engine's counters only.
"""

import asyncio
import copy
import logging
from collections.abc import Callable

from msgspec import UNSET

from minserve.api.figures import Figures, figures_between
from minserve.protocol import Stats

logger = logging.getLogger("minserve")

INTERVAL_S = 10.0


def activity_line(before: Stats, now: Stats, seconds: float) -> str | None:
    """What has been done between two readings; None if nothing has and nothing runs."""
    figures = figures_between(before, now, seconds)
    prompt, generated = figures.prompt_tokens_per_s, figures.generation_tokens_per_s
    if not (prompt or generated or now.num_running or now.num_waiting):
        return None
    return (
        f"prompt {prompt:.1f} tok/s, generation {generated:.1f} tok/s, "
        f"running {now.num_running}, waiting {now.num_waiting}, "
        f"KV {100 * now.num_pages_used / max(1, now.num_pages):.1f}%, "
        f"prefix hits {100 * (figures.prefix_hit_rate or 0.0):.1f}%"
        + (f", host KV {100 * now.num_host_blocks_used / now.num_host_blocks:.1f}%" if now.num_host_blocks else "")
        + (f", {1 + sum(figures.acceptance):.2f} tokens a step with drafts" if figures.acceptance else "")
        + _sparse_part(before, now, figures)
    )


def _sparse_part(before: Stats, now: Stats, figures: Figures) -> str:
    """What working sets have done; nothing if there was none. The link's rate is that of what was fetched: what is
    stored goes the other way, and is a sixteenth of a block a token."""
    if not now.num_sparse and now.sparse_steps == before.sparse_steps:
        return ""
    asked, surprises = now.sparse_asked - before.sparse_asked, now.sparse_surprises - before.sparse_surprises
    rate, unit = (figures.link_bytes_per_s or 0.0) / 1e6, "MB/s"
    if rate >= 1000:
        rate, unit = rate / 1000, "GB/s"
    hits = figures.working_set_hit_rate
    return (
        f", sparse {now.num_sparse}"
        + ("" if hits is UNSET else f", hits {100 * hits:.1f}%")
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
