"""The line every ten seconds."""

from minserve.api.activity import activity_line
from minserve.protocol import Stats


def test_a_busy_interval_is_told_in_rates_and_shares():
    before = Stats(prompt_tokens=100, generation_tokens=50, prefix_queries_tokens=100, prefix_hits_tokens=0)
    now = Stats(
        prompt_tokens=1100, generation_tokens=250, prefix_queries_tokens=1100, prefix_hits_tokens=250,
        num_running=3, num_waiting=2, num_pages=100, num_pages_used=25,
    )  # fmt: skip
    assert activity_line(before, now, 10.0) == (
        "prompt 100.0 tok/s, generation 20.0 tok/s, running 3, waiting 2, KV 25.0%, prefix hits 25.0%"
    )


def test_drafts_are_told_as_tokens_a_step():
    before, now = Stats(), Stats(generation_tokens=10)
    now.note_drafts(3, [1, 3, 2])
    line = activity_line(before, now, 10.0)
    assert line is not None
    assert line.endswith(", 3.00 tokens a step with drafts")


def test_an_idle_interval_is_silent():
    stats = Stats(prompt_tokens=5, num_pages=10, num_pages_used=3)
    assert activity_line(stats, stats, 10.0) is None
