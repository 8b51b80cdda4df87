"""Requests that are given up at any moment leave nothing behind, and the next one is right."""

import pytest

from tests.engine.soak import HOST_KV, SPARSE, answer, small_engine, soak


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"run_ahead": 0}, {"run_ahead": 1}, {"run_ahead": 1} | HOST_KV, {"run_ahead": 1} | SPARSE]
)
def test_after_a_thousand_random_aborts_every_page_is_there_and_the_next_request_is_right(tmp_path, options):
    engine = small_engine(tmp_path, **options)
    expected = answer(engine)
    soak(engine, 1000, seed=options["run_ahead"])
    engine.check()
    stats = engine.step().stats
    assert (stats.num_pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    is_sparse = "sparse" in options  # then hardly anybody has to give way
    assert stats.num_demotions > 0 if is_sparse else stats.num_preemptions > 0
    assert answer(engine) == expected
