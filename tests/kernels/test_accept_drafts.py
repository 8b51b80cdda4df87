"""Drafts that are right make a step longer and change nothing else: the kernel alone, and with those around it."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch

from minserve.kernels.accept_drafts import Limits, accept_drafts, accept_drafts_reference, accept_drafts_triton
from minserve.kernels.adjust_logits import (
    Adjustments,
    adjust_logits_reference,
    adjust_logits_triton,
    count_tokens_reference,
    count_tokens_triton,
)
from minserve.kernels.sampling import SamplingState, draw_reference, draw_triton
from minserve.kernels.step_inputs import step_inputs_reference, step_inputs_triton

MAX_DRAFTS = 5
RUNS = pytest.mark.parametrize("run", [accept_drafts_triton, accept_drafts_reference])


@RUNS
@pytest.mark.parametrize("rows_per_entry", [1, 2, 4, MAX_DRAFTS + 1])
@pytest.mark.parametrize("entries", [1, 16, 67])
def test_tokens_count_up_to_the_first_wrong_draft(run, entries, rows_per_entry, device):
    tokens = torch.randint(0, 2, (entries * rows_per_entry,), device=device)
    lanes = torch.randperm(entries + 3, device=device)[:entries]
    lanes[3::5] = -1
    drafts = torch.randint(0, 2, (entries + 3, MAX_DRAFTS), device=device)
    drafts[::4, 1] = -1
    last_token = torch.full((entries + 3,), -7, device=device)
    num_tokens = torch.arange(entries + 3, device=device) + 5

    expected_counts, expected_last, expected_num = [0] * entries, last_token.clone(), num_tokens.clone()
    for entry, lane in enumerate(lanes.tolist()):
        if lane >= 0:
            own, count = tokens[entry * rows_per_entry :][:rows_per_entry].tolist(), 1
            while count < rows_per_entry and own[count - 1] == drafts[lane, count - 1]:
                count += 1
            expected_counts[entry], expected_last[lane] = count, own[count - 1]
            expected_num[lane] += count
    assert run(tokens, lanes, drafts, last_token, num_tokens).tolist() == expected_counts
    assert last_token.tolist() == expected_last.tolist()
    assert num_tokens.tolist() == expected_num.tolist()


@RUNS
def test_lanes_may_have_no_drafts_at_all(run, device):
    tokens, lanes = torch.tensor([4, 6], device=device), torch.tensor([1, -1], device=device)
    last_token, num_tokens = torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([3, 3], device=device)
    drafts = torch.empty(2, 0, dtype=torch.int64, device=device)
    assert run(tokens, lanes, drafts, last_token, num_tokens).tolist() == [1, 0]
    assert (last_token.tolist(), num_tokens.tolist()) == ([0, 4], [3, 4])


def test_more_rows_than_drafts_are_our_mistake(device):
    lanes, drafts = torch.tensor([0], device=device), torch.zeros(1, 2, dtype=torch.int64, device=device)
    tables = torch.zeros(2, 1, dtype=torch.int64, device=device)
    assert accept_drafts(torch.tensor([0, 0, 3], device=device), lanes, drafts, *tables).tolist() == [3]
    assert tables.tolist() == [[3], [3]]
    with pytest.raises(AssertionError):
        accept_drafts(torch.zeros(4, dtype=torch.int64, device=device), lanes, drafts, *tables)


@pytest.mark.parametrize("accept", [accept_drafts_reference, accept_drafts_triton])
def test_no_more_tokens_count_than_an_entry_may_have(accept, device):
    tokens = torch.tensor([5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7], device=device)
    tokens = tokens.repeat(2)[: 3 * 5]
    lanes = torch.tensor([0, 1, 2, -1, 3], device=device)
    drafts = torch.tensor([[5, 6], [5, 6], [5, 6], [5, 6]], device=device)
    last_token, num_tokens = torch.tensor([[1, 2, 3, 4], [10, 20, 30, 40]], device=device)
    again, sparse = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 0, 0]], dtype=torch.bool, device=device)
    limits = Limits(again, sparse[:4], torch.tensor([1, 2, 8, 0], device=device))
    assert accept(tokens, lanes, drafts, last_token, num_tokens, limits).tolist() == [2, 0, 3, 0, 3]
    assert (last_token.tolist(), num_tokens.tolist()) == ([6, 2, 7, 7], [12, 20, 33, 43])


class Kernels(NamedTuple):
    step_inputs: object
    adjust_logits: object
    draw: object
    accept_drafts: object
    count_tokens: object


REFERENCES = Kernels(
    step_inputs_reference, adjust_logits_reference, draw_reference, accept_drafts_reference, count_tokens_reference
)
TRITON = Kernels(
    step_inputs_triton,
    adjust_logits_triton,
    partial(draw_triton, tile=32, cut_tile=64),
    accept_drafts_triton,
    count_tokens_triton,
)
KERNELS = pytest.mark.parametrize("kernels", [TRITON, REFERENCES], ids=["triton", "reference"])
VOCAB, NUM_LANES = 40, 5
LANES = [3, -1, 0, 4, 1]


class Server:
    """All of a decode step but the model: its logits depend on a row's token and position, and it stores nothing."""

    def __init__(self, kernels, device, dtype):
        random = torch.Generator().manual_seed(5)

        def table(values, dtype=torch.float32):
            return torch.tensor(values, dtype=dtype, device=device)

        def randint(high, *shape):
            return torch.randint(high, shape, generator=random).to(device)

        self.kernels, self.device = kernels, device
        self.model = (2 * torch.randn(100, VOCAB, generator=random)).to(device, dtype)
        self.page_table = randint(1000, NUM_LANES, 4).int()
        self.last_token, self.num_tokens = randint(VOCAB, NUM_LANES), randint(30, NUM_LANES) + 1
        self.drafts = torch.full((NUM_LANES, MAX_DRAFTS), -1, device=device)
        self.end = torch.full((NUM_LANES,), 100, device=device)
        self.penalized = table([True, False, False, False, True], torch.bool)
        self.output_counts = randint(2, NUM_LANES, VOCAB).int()
        self.sampling = SamplingState(
            temperature=table([1.0, 0.0, 1.0, 0.8, 1.5]),
            top_p=table([1.0, 1.0, 1.0, 0.8, 1.0]),
            min_p=table([0.0] * NUM_LANES),
            top_k=table([0, 0, 0, 0, 12], torch.int64),
            seed=randint(2**32, NUM_LANES, 2),
            num_tokens=self.num_tokens,
        )
        # Lane 0 is barred from its favourite tokens until its third row, and 1 is greedy with a bias.
        self.adjustments = Adjustments(
            num_tokens=self.num_tokens,
            min_position=self.num_tokens + table([2, 0, 0, 0, 0], torch.int64),
            end_ids=torch.arange(3, device=device).repeat(NUM_LANES, 1),
            bias_ids=table([[0, 1]] + [[7, -1]] * (NUM_LANES - 1), torch.int64),
            bias=table([[9.0, 9.0]] + [[1.5, torch.nan]] * (NUM_LANES - 1)),
            repetition=table([1.0, 1.0, 1.0, 1.0, 1.4]),
            presence=table([0.6, 0.0, 0.0, 0.0, 0.0]),
            frequency=table([0.5, 0.0, 0.0, 0.0, -0.7]),
            prompt_seen=randint(2, NUM_LANES, VOCAB).bool(),
            output_counts=self.output_counts,
            drafts=self.drafts,
            constrained=table([False] * NUM_LANES, torch.bool),
            allowed=torch.zeros(NUM_LANES, 1 + self.drafts.shape[1], -(-VOCAB // 32), dtype=torch.int32, device=device),
        )

    def step(self, num_drafts):
        """(tokens [entries, R], counts [entries]), lists both."""
        lanes = torch.tensor(LANES, device=self.device)
        tables = (self.last_token, self.drafts, self.num_tokens, self.end, self.page_table)
        token_ids, positions, _, _ = self.kernels.step_inputs(*tables, lanes, num_drafts, 16)
        logits = self.model[(token_ids * 7 + positions) % 100]
        logits = self.kernels.adjust_logits(logits, lanes, self.adjustments)
        tokens = self.kernels.draw(logits, lanes, self.sampling)
        counts = self.kernels.accept_drafts(tokens, lanes, self.drafts, self.last_token, self.num_tokens)
        self.kernels.count_tokens(tokens, lanes, counts, self.output_counts, self.penalized)
        return tokens.view(len(LANES), 1 + num_drafts).tolist(), counts.tolist()

    def state(self, lane):
        return [table[lane].tolist() for table in (self.last_token, self.num_tokens, self.output_counts)]

    def propose(self, guesses):
        """guesses: for each entry, tokens that may come next."""
        for lane, own in zip(LANES, guesses, strict=True):
            if lane >= 0:
                self.drafts[lane, : len(own)] = torch.tensor(own, dtype=torch.int64)


@cache
def one_by_one(kernels, device, dtype):
    """What steps of one row come to: each entry's text, and its lane's state after each step."""
    server = Server(kernels, device, dtype)
    texts, states = [[] for _ in LANES], [[server.state(lane)] for lane in LANES]
    for _ in range(4):
        tokens, _ = server.step(0)
        for entry, lane in enumerate(LANES):
            texts[entry] += tokens[entry]
            states[entry].append(server.state(lane))
    return texts, states


def assert_has_come(server, tokens, counts, expected_counts):
    """Each entry's text and state are those after as many steps of one row as it has a count."""
    texts, states = one_by_one(server.kernels, server.device, server.model.dtype)
    expected_counts = [0 if lane < 0 else count for lane, count in zip(LANES, expected_counts, strict=True)]
    assert counts == expected_counts
    for entry, (lane, count) in enumerate(zip(LANES, counts, strict=True)):
        assert tokens[entry][:count] == texts[entry][:count]
        if lane >= 0:
            assert server.state(lane) == states[entry][count]
    assert server.state(2) == Server(server.kernels, server.device, server.model.dtype).state(2)


@KERNELS
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_step_with_drafts_that_are_all_right_is_as_many_steps_as_it_has_rows(kernels, num_drafts, device, dtype):
    texts, _ = one_by_one(kernels, device, dtype)
    server = Server(kernels, device, dtype)
    server.propose(text[:num_drafts] for text in texts)
    assert_has_come(server, *server.step(num_drafts), [1 + num_drafts] * len(LANES))


@KERNELS
@pytest.mark.parametrize(("num_right", "missing"), [((0, 0, 1, 2, 3), {0, 2}), ((2, 0, 0, 1, 1), {3})])
def test_a_draft_that_is_wrong_or_missing_ends_the_entry_s_step_there(kernels, num_right, missing, device, dtype):
    texts, _ = one_by_one(kernels, device, dtype)
    server = Server(kernels, device, dtype)
    guesses = [text[:3] for text in texts]
    for entry, (own, right) in enumerate(zip(guesses, num_right, strict=True)):
        if right < 3:
            own[right] = -1 if entry in missing else (own[right] + 1) % VOCAB
    server.propose(guesses)
    assert_has_come(server, *server.step(3), [1 + right for right in num_right])


@KERNELS
def test_an_end_in_the_middle_of_the_rows_leaves_those_before_it_as_they_are(kernels, device, dtype):
    texts, _ = one_by_one(kernels, device, dtype)
    server = Server(kernels, device, dtype)
    server.propose(text[:1] for text in texts)
    server.end.copy_(server.num_tokens + 2)
    assert_has_come(server, *server.step(3), [2] * len(LANES))
