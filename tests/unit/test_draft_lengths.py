"""How many drafts are worth proposing: the number that gives the most tokens a second."""

import random

from minserve.spec.lengths import CHOICES, LOOK_AGAIN, AdaptiveLength, FixedLength


def choices_of(policy, steps, seconds, share_right, lengths=(100,)):
    """What a policy chooses in a world where a step with n drafts takes seconds(n) and each draft is right so often."""
    rng = random.Random(0)
    chosen, verified = [], 0
    for _ in range(steps):
        proposed = policy.choose(lengths)
        accepted = []
        for _ in lengths:
            count = 0
            while count < verified and rng.random() < share_right:
                count += 1
            accepted.append(count)
        policy.note(verified, lengths, accepted, seconds(verified) if verified == proposed else None)
        chosen.append(proposed)
        verified = proposed
    return chosen


def usual(chosen):
    return max(CHOICES, key=chosen[len(chosen) // 2 :].count)


def test_drafts_that_cost_nothing_and_are_right_are_proposed():
    assert usual(choices_of(AdaptiveLength(), 300, lambda n: 1.0, 0.8)) == 3


def test_drafts_that_are_never_right_are_not_proposed():
    assert usual(choices_of(AdaptiveLength(), 300, lambda n: 1.0 + 0.05 * n, 0.0)) == 0


def test_drafts_that_cost_as_much_as_tokens_are_not_proposed():
    assert usual(choices_of(AdaptiveLength(), 300, lambda n: 1.0 + n, 0.6)) == 0


def test_between_these_few_drafts_are_best():
    assert usual(choices_of(AdaptiveLength(), 600, lambda n: 1.0 + 0.25 * n, 0.45)) == 1


def test_every_number_is_tried_at_first_and_again_from_time_to_time():
    policy = AdaptiveLength()
    chosen = choices_of(policy, 10 * LOOK_AGAIN, lambda n: 1.0, 0.9)
    assert set(chosen[:10]) == set(CHOICES)
    assert set(chosen[5 * LOOK_AGAIN :]) == set(CHOICES)
    assert chosen.count(3) > 0.85 * len(chosen)


def test_texts_of_other_lengths_are_judged_on_their_own():
    policy = AdaptiveLength()
    cost = lambda n: 1.0 + 0.1 * n  # noqa: E731
    assert usual(choices_of(policy, 300, cost, 0.8, lengths=(100,))) == 3
    assert usual(choices_of(policy, 300, cost, 0.0, lengths=(9000,))) == 0
    assert usual([policy.choose((100,)) for _ in range(LOOK_AGAIN)]) == 3


def test_a_step_that_was_held_up_once_does_not_count_for_long():
    """What a GPU does once, such as capturing a graph, would otherwise rule a length out for good."""
    policy, held_up = AdaptiveLength(), set()

    def seconds(num_drafts):
        first = num_drafts not in held_up
        held_up.add(num_drafts)
        return (1.0 + 0.1 * num_drafts) * (50 if first and num_drafts else 1)

    assert usual(choices_of(policy, 2000, seconds, 0.8)) == 3


def test_where_no_step_tells_what_it_takes_acceptance_alone_decides():
    for share_right, expected in ((0.9, 3), (0.0, 0)):
        chosen = choices_of(AdaptiveLength(), 300, lambda n: None, share_right)
        assert usual(chosen) == expected


def test_without_requests_nothing_is_proposed():
    assert AdaptiveLength().choose(()) == 0


def test_a_fixed_number_is_fixed():
    assert set(choices_of(FixedLength(5), 20, lambda n: 1.0, 0.0)) == {5}
