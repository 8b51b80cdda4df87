"""The line every ten seconds."""

from msgspec.structs import replace

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


WORKED = Stats(
    generation_tokens=10, sparse_steps=10, sparse_hits=900, sparse_misses=100, sparse_asked=200, sparse_surprises=15,
    bytes_fetched=250_000_000,
)  # fmt: skip


def end_of_line(before, now):
    line = activity_line(before, now, 10.0)
    assert line is not None
    return line.partition("prefix hits 0.0%")[2]


def test_working_sets_are_told_while_somebody_is_sparse_and_in_the_interval_in_which_the_last_one_was():
    told = ", hits 90.0%, surprises 7.5%, link 25.0 MB/s"
    assert end_of_line(Stats(), replace(WORKED, num_sparse=3)) == ", sparse 3" + told
    assert end_of_line(Stats(), WORKED) == ", sparse 0" + told
    assert end_of_line(WORKED, replace(WORKED, generation_tokens=20)) == ""


def test_the_link_is_told_in_gigabytes_where_it_is_fast():
    now = replace(WORKED, num_sparse=1, bytes_fetched=514_000_000_000)
    assert end_of_line(Stats(), now).endswith(", link 51.4 GB/s")


def test_a_request_that_became_sparse_just_now_has_no_shares_yet():
    assert end_of_line(Stats(), Stats(generation_tokens=1, num_sparse=1)) == ", sparse 1, link 0.0 MB/s"
