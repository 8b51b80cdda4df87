"""What a server does, in figures: what lies between two readings of the engine's counters.

Owns: how rates and shares are worked out, for the line in the log and for the stream that people look at.
Does not know: who reads them, where the counters come from.
"""

import msgspec
from msgspec import UNSET, UnsetType

from minserve.protocol import Stats


class Figures(msgspec.Struct, kw_only=True):
    """Gauges as of now, and rates of the seconds since the last reading. What there is nothing to say of is absent.

    time_to_first_token_s: mean of the answers that have begun. prefix_hit_rate: of the prompt tokens that were looked
    up. acceptance: how often the first draft was right, how often the first two were...

    Of sparse requests, and absent until there was one: num_sparse; working_set_hit_rate: of the blocks that were
    wanted, those that were in pages; surprises_per_s: blocks that were wanted at once and had not been foreseen;
    link_bytes_per_s: from host memory to the GPU.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_used: int
    num_host_blocks: int | UnsetType = UNSET
    num_host_blocks_used: int | UnsetType = UNSET
    prompt_tokens_per_s: float | UnsetType = UNSET
    generation_tokens_per_s: float | UnsetType = UNSET
    time_to_first_token_s: float | UnsetType = UNSET
    prefix_hit_rate: float | UnsetType = UNSET
    acceptance: list[float] | UnsetType = UNSET
    num_sparse: int | UnsetType = UNSET
    working_set_hit_rate: float | UnsetType = UNSET
    surprises_per_s: float | UnsetType = UNSET
    link_bytes_per_s: float | UnsetType = UNSET


def gauges(now: Stats) -> Figures:
    """What one reading tells: no rates."""
    figures = Figures(
        num_running=now.num_running,
        num_waiting=now.num_waiting,
        num_pages=now.num_pages,
        num_pages_used=now.num_pages_used,
    )
    if now.num_host_blocks:
        figures.num_host_blocks = now.num_host_blocks
        figures.num_host_blocks_used = now.num_host_blocks_used
    if now.num_demotions or now.num_sparse or now.sparse_steps:
        figures.num_sparse = now.num_sparse
    return figures


def figures_between(before: Stats, now: Stats, seconds: float) -> Figures:
    """What two readings tell that lie so many seconds apart."""
    figures = gauges(now)
    figures.prompt_tokens_per_s = (now.prompt_tokens - before.prompt_tokens) / seconds
    figures.generation_tokens_per_s = (now.generation_tokens - before.generation_tokens) / seconds
    if queries := now.prefix_queries_tokens - before.prefix_queries_tokens:
        figures.prefix_hit_rate = (now.prefix_hits_tokens - before.prefix_hits_tokens) / queries
    if drafts := now.num_drafts - before.num_drafts:
        longest = max((place for place, count in enumerate(now.accepted_at, 1) if count), default=1)
        figures.acceptance = [
            (count - earlier) / drafts
            for count, earlier in zip(now.accepted_at[:longest], before.accepted_at[:longest], strict=True)
        ]
    if figures.num_sparse is not UNSET:
        _add_sparse(figures, before, now, seconds)
    return figures


def _add_sparse(figures: Figures, before: Stats, now: Stats, seconds: float) -> None:
    hits, misses = now.sparse_hits - before.sparse_hits, now.sparse_misses - before.sparse_misses
    if hits + misses:
        figures.working_set_hit_rate = hits / (hits + misses)
    figures.surprises_per_s = (now.sparse_surprises - before.sparse_surprises) / seconds
    figures.link_bytes_per_s = (now.bytes_fetched - before.bytes_fetched) / seconds
