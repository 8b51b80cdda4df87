"""What the server's options and a request's own make of it."""

import pytest

from minserve.engine.sparse_rules import RETRY_ABOVE
from minserve.errors import RequestError
from minserve.protocol import SparseParams
from tests.sim.sparse_traffic import sparse_rules


def test_a_request_is_served_as_the_server_does_unless_it_says_otherwise():
    rules = sparse_rules(128, mode="above", above=5000)
    assert rules.terms(None).above == 5000
    assert rules.terms(SparseParams(mode="always")).above == 0
    assert rules.terms(SparseParams(mode="pressure")).above is None
    assert rules.terms(SparseParams(mode="never")) is None


def test_a_server_that_never_does_it_does_it_on_request():
    rules = sparse_rules(128, mode="never")
    assert rules.terms(None) is None
    assert rules.terms(SparseParams(mode="always")).above == 0


def test_fixed_fetches_bound_a_head_and_adaptive_ones_a_lane():
    fixed = sparse_rules(128, fetch="fixed", fetch_ratio=0.05, num_kv_heads=8).terms(None)
    adaptive = sparse_rules(128, fetch="adaptive", fetch_ratio=0.05, num_kv_heads=8).terms(None)
    assert (fixed.policy.cap, fixed.allowance, fixed.fixed) == (6, 48, True)
    assert (adaptive.policy.cap, adaptive.allowance, adaptive.fixed) == (128, 48, False)


def test_rows_run_again_only_where_misses_are_neither_taken_nor_avoided():
    def threshold(miss_policy, own=None):
        return sparse_rules(8, miss_policy=miss_policy).terms(SparseParams(miss_policy=own)).policy.retry_above

    assert threshold("retry") == RETRY_ABOVE
    assert threshold("retry", "approximate") is None
    assert threshold("approximate", "retry") == RETRY_ABOVE
    assert threshold("recall") is threshold("recall", "retry") is None


def test_without_a_head_nobody_looks_ahead_by_drafts_or_verifies_any():
    rules = sparse_rules(8, has_head=False, num_verified=3)
    policy = rules.terms(SparseParams(verify_drafts=3)).policy
    assert (policy.looks_ahead, policy.num_verified) == (False, 0)
    with pytest.raises(RequestError) as error:
        rules.terms(SparseParams(lookahead="draft"))
    assert error.value.param == "sparse.lookahead"


def test_a_step_verifies_no_more_than_the_ring_has_room_for():
    rules = sparse_rules(8, has_head=True, num_verified=8)
    assert rules.terms(None).policy.num_verified == 7
    assert rules.terms(SparseParams(verify_drafts=8)).policy.num_verified == 7


def test_whatever_changes_numbers_is_in_the_key_and_nothing_else():
    rules = sparse_rules(8, has_head=True)
    key = rules.terms(None).key
    changes = [{"lookahead": "current"}, {"verify_drafts": 2}, {"miss_policy": "retry"}, {"fetch": "fixed"}, {"cap": 1}]
    keys = {rules.terms(SparseParams(**change)).key for change in changes}
    others = [sparse_rules(9, has_head=True), sparse_rules(8, has_head=True, miss_policy="recall")]
    keys |= {other.terms(None).key for other in others}
    assert len(keys | {key}) == len(changes) + len(others) + 1
    assert rules.terms(SparseParams(mode="always")).key == key
