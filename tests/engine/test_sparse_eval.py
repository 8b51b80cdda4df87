"""The evaluation of sparse requests measures what it says: on numbers made by hand, a tiny model, and SmolLM2."""

import json
import random

import pytest
import torch

from minserve.engine.plan import Fetched
from tests.engine.tiny import CONFIG, tiny_engine
from tools.sparse_eval.command import main
from tools.sparse_eval.follow import Seen, follow
from tools.sparse_eval.looking_ahead import Agreement
from tools.sparse_eval.plots import draw
from tools.sparse_eval.policies import DENSE, Policy
from tools.sparse_eval.recall_tests import copied
from tools.sparse_eval.report import table
from tools.sparse_eval.texts import Task
from tools.sparse_lab import SparseLab

PROMPT = [random.Random(5).randrange(96) for _ in range(203)]
TEXT = [*PROMPT, *(random.Random(6).randrange(96) for _ in range(80))]
UNTIL = len(TEXT) - 3


def tiny_lab(folder):
    """A lane that has read PROMPT, and can be returned to."""
    # With norms, and slow coordinates that RoPE turns in so short a text: without these all blocks are alike.
    model = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "rope_theta": 30.0}
    lab = SparseLab(tiny_engine(folder, model, sparse="never", max_num_seqs=1))
    lab.use(1)
    lab.read(PROMPT, 100, forced=TEXT[len(PROMPT) :])
    lab.decode(forced=TEXT[len(PROMPT) + 1 :])
    return lab, lab.snapshot()


def followed(lab, start, policy, text=TEXT):
    return list(follow(lab, start, policy, UNTIL, text))


def seen(ahead, normal, right, tokens=(1,), lacking=0.0):
    """A step of one layer and one head, by the blocks that it wants of 8."""
    sets = [torch.zeros(1, 1, 8, dtype=torch.bool).index_fill_(2, torch.tensor(own), True) for own in (ahead, normal)]
    fetched = Fetched(hits=0, misses=0, cut=0, surprises=1, asked=len(normal))
    return Seen(list(tokens), [], [], fetched, *sets, right, lacking)


def test_agreement_is_the_share_of_what_a_step_wants_that_the_step_before_expected():
    agreement = Agreement(num_layers=1)
    steps = [seen([1, 2], [1], True), seen([3, 4], [1, 5], False, lacking=0.5), seen([1], [3, 4, 6, 7], True)]
    agreement.add(steps)
    row = agreement.row()
    assert row["when_right"] == 1 / 2
    assert row["when_wrong"] == 2 / 4
    assert row["agreement"] == row["worst_layer"] == 3 / 6
    assert (row["right"], row["lacking"], row["steps"]) == (2 / 3, 0.5 / 3, 3)


def test_a_step_that_runs_again_expects_nothing():
    agreement = Agreement(num_layers=1)
    agreement.add([seen([1], [1], False, tokens=()), seen([1], [2, 3], False)])
    assert agreement.row()["agreement"] is None
    assert agreement.row()["tokens_per_step"] == 1 / 2


def test_a_passage_is_copied_as_far_as_it_is_repeated_in_its_order():
    task = Task([], [], [1, 2, 3, 4], 0.5)
    assert copied(task, [1, 2, 3, 4]) == 1.0
    assert copied(task, [1, 2, 9, 3]) == 3 / 4
    assert copied(task, [7, 8]) == 0.0


def test_a_table_shows_numbers_under_their_names_and_leaves_lists_out():
    rows = [{"a_b": 0.25, "n": 3, "all": [1]}, {"a_b": None, "n": 12345.6, "all": []}]
    assert table(rows).splitlines() == ["  a b       n", "0.250       3", "    -  12,346"]
    assert table(rows, ["n"]).splitlines()[0] == "     n"


def test_a_lane_that_is_restored_goes_on_as_it_did(tmp_path):
    lab, start = tiny_lab(tmp_path)
    sparse = Policy(name="sparse", num_slots=4, fetch="fixed", cap=1)
    first = [[step.losses for step in followed(lab, start, policy)] for policy in (DENSE, sparse)]
    again = [[step.losses for step in followed(lab, start, policy)] for policy in (DENSE, sparse)]
    assert first == again
    assert first[0] != first[1]


def test_a_token_of_the_text_is_fed_again_until_its_step_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.sparse_eval.policies.RETRY_ABOVE", 0.0)
    lab, start = tiny_lab(tmp_path)
    steps = followed(lab, start, Policy(name="retry", num_slots=4, retries=True))
    assert [] in [step.tokens for step in steps]
    assert lab.token_ids == TEXT[:UNTIL]


@pytest.mark.parametrize(("num_drafts", "num_verified"), [(1, 0), (2, 1), (3, 2), (3, 3)])
def test_drafts_that_are_the_text_are_accepted_as_far_as_they_are_verified(tmp_path, num_drafts, num_verified):
    lab, start = tiny_lab(tmp_path)
    perfect = Policy(name="perfect", num_slots=4, lookahead="perfect", num_drafts=num_drafts, num_verified=num_verified)
    steps = followed(lab, start, perfect)
    assert all(step.right for step in steps)
    assert {len(step.tokens) for step in steps[:-1]} == {1 + num_verified}
    assert lab.token_ids[:UNTIL] == TEXT[:UNTIL]


def test_behind_the_given_text_a_lane_goes_on_with_its_own(tmp_path):
    lab, start = tiny_lab(tmp_path)
    given = TEXT[: len(PROMPT) + 20]
    followed(lab, start, Policy(name="all", num_slots=20), given)
    sparse = list(lab.token_ids)
    followed(lab, start, DENSE, given)
    assert sparse == lab.token_ids
    assert sparse[: len(given)] == given


@pytest.mark.slow
def test_the_quick_evaluation_of_smollm2(tmp_path):
    """That accounts add up is asserted in every step; see `follow`."""
    main(
        [
            "loss",
            "agreement",
            "traffic",
            "needles",
            "--quick",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--out",
            str(tmp_path),
        ]
    )
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")
    }
    assert rows.keys() == {"loss", "agreement", "traffic", "needles"}

    everything = rows["loss"][-1]
    assert abs(everything["above_dense"]) < 1e-4
    assert everything["same_token"] == 1.0

    agreement = {row["policy"]: row for row in rows["agreement"] if row["text"] == "given"}
    assert agreement["perfect"]["when_right"] > 0.95
    assert agreement["perfect"]["agreement"] > agreement["current"]["agreement"]
    if "(1, 0)" in agreement:
        assert agreement["(1, 0)"]["when_right"] is None or agreement["(1, 0)"]["when_right"] > 0.95

    traffic = {row["policy"]: row for row in rows["traffic"]}
    assert traffic["recall"]["surprises"] == traffic["recall"]["cut"] == 0.0
    assert traffic["fixed 2"]["fetched"] <= 2.0
    assert all(row["fetched"] == pytest.approx(row["misses"] - row["cut"]) for row in traffic.values())

    needles = {row["policy"]: row for row in rows["needles"]}
    assert needles["dense"]["score"] == needles["recall"]["score"] == 1.0
    assert needles["dense"]["bytes_per_step"] == 0.0


def test_every_question_has_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    common = {"policy": "a", "K": 8, "by_layer": [0.5, 0.6], "text": "own", "tokens_per_step": 1.5, "agreement": 0.9}
    common |= {"cap": None, "above_dense": 0.1, "error": None, "fetched": 1.0, "cut": 0.5, "surprises": 0.2}
    common |= {"score": 0.5, "trials": 2, "depths": [0.1, 0.9], "by_depth": [0.0, 1.0]}
    for question in ("loss", "agreement", "speed", "traffic", "needles", "copy"):
        assert draw(question, [common, common | {"text": "given", "K": 16}], tmp_path / f"{question}.png")
        assert (tmp_path / f"{question}.png").read_bytes()[:4] == b"\x89PNG"
