"""Requests that are given up at any moment leave nothing behind, and the next one is right."""

import random

import pytest

from tests.engine.tiny import VOCAB, finish, submit, tiny_engine, tokens


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_after_a_thousand_random_aborts_every_page_is_there_and_the_next_request_is_right(tmp_path, run_ahead):
    page = 2 * 2 * 2 * 16 * 8 * 4
    engine = tiny_engine(
        tmp_path,
        run_ahead=run_ahead,
        kv_cache_memory=24 * page,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=32,
    )
    rng = random.Random(run_ahead)
    prompt = [rng.randrange(VOCAB) for _ in range(40)]
    expected = tokens(engine, prompt, temperature=0.0, max_tokens=20, ignore_eos=True)

    alive, ends, aborted = set(), {}, 0
    number = 0
    while aborted < 1000:
        while len(alive) < 9:
            number += 1
            request_id = f"r{number}"
            own = (prompt + [rng.randrange(VOCAB) for _ in range(150)])[: rng.randint(1, 190)]
            engine.submit(submit(request_id, own, max_tokens=rng.randint(1, 60), seed=number))
            alive.add(request_id)
        if rng.random() < 0.7:
            victim = rng.choice(sorted(alive))
            engine.abort(victim)
            aborted += 1
        for delta in engine.step().deltas:
            assert delta.request_id not in ends, "a delta after the end"
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.finish_reason
                alive.discard(delta.request_id)
        engine.check()
    engine.abort_all()
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.request_id not in ends, "a delta after the end"
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.finish_reason
    engine.check()
    assert len(ends) == number
    stats = engine.step().stats
    assert (stats.num_pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_preemptions > 0
    again = finish(engine, submit("next", prompt, temperature=0.0, max_tokens=20, ignore_eos=True))["next"]
    assert [token for delta in again for token in delta.token_ids] == expected
