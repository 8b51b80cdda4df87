"""Random texts follow the model's own distribution, token by token, whatever the drafts were.

Many texts of one prompt, each with its own seed, are counted by their first tokens and compared with softmax(logits
/ temperature) by a chi-square test: for the second and third token given those before, so that tokens behind accepted
drafts and in place of rejected ones are counted too. The seeds are fixed, and so is what comes out.
"""

from collections import Counter
from dataclasses import replace
from itertools import product
from statistics import NormalDist

import pytest
import torch

from minserve.kernels.accept_drafts import accept_drafts
from minserve.kernels.sampling import draw
from tests.engine.heads import Oracle, write_head
from tests.engine.tiny import CONFIG, finish, submit, tiny_engine
from tests.unit.dense_attend import DenseAttend

VOCAB = 8
PROMPT = [5, 1, 7, 3, 3, 2]
NUM_TEXTS = 6000
NUM_TOKENS = 3
TEMPERATURE = 0.9
RARE = 5
"""A cell of the test is expected to hold at least so many texts, as usual."""


def drafting_engine(folder):
    head = write_head(folder / "head", vocab=VOCAB, ids=list(range(VOCAB)))
    return small_engine(folder, draft_path=str(head), num_draft_tokens=2)


def small_engine(folder, **options):
    model = {**CONFIG, "vocab_size": VOCAB}
    return tiny_engine(folder, model, max_num_seqs=256, max_num_batched_tokens=2048, **options)


def texts_of(engine):
    """The first tokens of each text, by its id."""
    # One token more than is looked at: the last step of a text proposes nothing.
    requests = [
        submit(str(seed), PROMPT, seed=seed, temperature=TEMPERATURE, max_tokens=NUM_TOKENS + 1)
        for seed in range(NUM_TEXTS)
    ]
    return {
        name: [token for delta in own for token in delta.token_ids] for name, own in finish(engine, *requests).items()
    }


@torch.inference_mode()
def next_probabilities(engine):
    """What the model says of the token behind the prompt and each few tokens: {tokens: probabilities}."""
    model = engine._runner._model
    expected = {}
    for count in range(NUM_TOKENS):
        for said in product(range(VOCAB), repeat=count):
            states = model(torch.tensor(PROMPT + list(said)), DenseAttend(model))
            expected[said] = torch.softmax(model.logits(states[-1:])[0].double() / TEMPERATURE, dim=0).tolist()
    return expected


def cells_of(counts, expected):
    """(counted, expected) of each token, but those that are rarely expected together."""
    cells, rest = [], (0, 0.0)
    for counted, mean in sorted(zip(counts, expected, strict=True), key=lambda cell: cell[1]):
        rest = rest[0] + counted, rest[1] + mean
        if rest[1] >= RARE:
            cells.append(rest)
            rest = (0, 0.0)
    if rest[1] and cells:
        cells[-1] = cells[-1][0] + rest[0], cells[-1][1] + rest[1]
    return cells


def chi_square(texts, expected, place):
    """(statistic, degrees of freedom) of the tokens at a place, given those before it."""
    counts = Counter(tuple(text[: place + 1]) for text in texts.values())
    before = Counter(tuple(text[:place]) for text in texts.values())
    statistic, freedom = 0.0, 0
    for said, number in before.items():
        counted = [counts[*said, token] for token in range(VOCAB)]
        cells = cells_of(counted, [number * share for share in expected[said]])
        statistic += sum((counted - mean) ** 2 / mean for counted, mean in cells)
        freedom += max(0, len(cells) - 1)
    return statistic, freedom


def bound(freedom, probability=1e-4):
    """What a right sampler exceeds with this probability, by Wilson and Hilferty's approximation (1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + NormalDist().inv_cdf(1 - probability) * spread**0.5) ** 3


def test_the_bound_is_that_of_the_printed_tables():
    assert bound(10, 0.001) == pytest.approx(29.588, rel=0.01)
    assert bound(100, 0.001) == pytest.approx(149.449, rel=0.01)


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory):
    return small_engine(tmp_path_factory.mktemp("undrafted"))


@pytest.fixture(scope="module")
def expected(undrafted):
    return next_probabilities(undrafted)


@pytest.mark.parametrize("drafter", ["none", "random head", "oracle"])
def test_samples_follow_the_models_distribution_with_drafts_as_without(tmp_path, undrafted, expected, drafter):
    engine = undrafted if drafter == "none" else drafting_engine(tmp_path)
    if drafter == "oracle":
        Oracle(engine, texts_of(undrafted), share_right=0.7, wrong=lambda token: (token + 1) % VOCAB)
    texts = texts_of(engine)
    stats = engine._scheduler.stats()
    if drafter != "none":
        for accepted in stats.accepted_at[:2]:
            assert 0.1 * stats.num_drafts < accepted < 0.9 * stats.num_drafts
    for place in range(NUM_TOKENS):
        statistic, freedom = chi_square(texts, expected, place)
        assert freedom > 0.8 * (VOCAB - 1) * VOCAB**place
        assert statistic < bound(freedom)


def take_all(monkeypatch):
    """Every draft is the text, whatever the model says."""

    def accept(tokens, lanes, drafts, last_token, num_tokens, most):
        assert most is None
        rows = tokens.view(len(lanes), -1)
        rows[:, :-1] = drafts[lanes, : rows.shape[1] - 1]
        return accept_drafts(tokens, lanes, drafts, last_token, num_tokens)

    monkeypatch.setattr("minserve.runner.sampler.accept_drafts", accept)


def draw_again(monkeypatch):
    """A draft that is wrong makes room for a new draw, and not for the one that showed it wrong."""
    new_draws = []

    def draw_twice(logits, lanes, state, allowed):
        new_draws.append(draw(logits, lanes, replace(state, seed=state.seed + 10**6), allowed))
        return draw(logits, lanes, state, allowed)

    def accept(tokens, lanes, drafts, last_token, num_tokens, most):
        assert most is None
        counts = accept_drafts(tokens, lanes, drafts, last_token, num_tokens)
        num_drafts = len(tokens) // len(lanes) - 1
        rejected = ((counts <= num_drafts) & (num_drafts > 0)).nonzero()[:, 0]
        at = rejected * (num_drafts + 1) + counts[rejected] - 1
        tokens[at] = last_token[lanes[rejected]] = new_draws.pop()[at]
        return counts

    monkeypatch.setattr("minserve.runner.sampler.draw", draw_twice)
    monkeypatch.setattr("minserve.runner.sampler.accept_drafts", accept)


@pytest.mark.parametrize("plant", [take_all, draw_again])
def test_a_wrong_acceptance_would_not_pass(tmp_path, expected, monkeypatch, plant):
    plant(monkeypatch)
    texts = texts_of(drafting_engine(tmp_path))
    statistic, freedom = chi_square(texts, expected, 0)
    assert statistic < bound(freedom)  # the first token of a text is drawn before anything is drafted
    for place in range(1, NUM_TOKENS):
        statistic, freedom = chi_square(texts, expected, place)
        assert statistic > bound(freedom)
