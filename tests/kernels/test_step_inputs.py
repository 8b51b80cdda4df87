"""A step's inputs from the lanes' tables: the reference and the kernel against a loop over the entries."""

import pytest
import torch

from minserve.kernels.step_inputs import WIDTH, step_inputs, step_inputs_reference, step_inputs_triton

RUNS = pytest.mark.parametrize("run", [step_inputs_reference, step_inputs_triton])
PADDING = (0, 0, -1, 0)
BLOCK_SIZE = 16


def tables(device, num_lanes, max_blocks):
    """last_token, num_tokens and page_table; pages are large, so that a product in 32 bits would show."""
    last_token = torch.randint(1, 150_000, (num_lanes,), device=device)
    num_tokens = torch.randint(1, max_blocks * BLOCK_SIZE + 1, (num_lanes,), device=device)
    page_table = torch.randint(2**28, 2**31 - 1, (num_lanes, max_blocks), device=device, dtype=torch.int32)
    return last_token, num_tokens, page_table


def entry(lane, last_token, num_tokens, page_table):
    position = num_tokens[lane].item() - 1
    page = page_table[lane, position // BLOCK_SIZE].item()
    return last_token[lane].item(), position, page * BLOCK_SIZE + position % BLOCK_SIZE, position + 1


def entries(outputs):
    assert all(output.dtype == torch.int64 for output in outputs)
    return list(zip(*(output.tolist() for output in outputs), strict=True))


@RUNS
@pytest.mark.parametrize("num_entries", [1, 15, 16, 17, 33, WIDTH + 1])
def test_an_entry_is_what_its_lane_has(run, num_entries, device):
    state = tables(device, 40, 7)
    lanes = torch.randint(-1, 40, (num_entries,), device=device)
    expected = [PADDING if lane < 0 else entry(lane, *state) for lane in lanes.tolist()]
    assert entries(run(*state, lanes, BLOCK_SIZE)) == expected


@RUNS
def test_a_position_lies_in_the_block_that_it_begins_or_ends(run, device):
    last_token, _, page_table = tables(device, 6, 3)
    num_tokens = torch.tensor([1, 16, 17, 32, 33, 48], device=device)
    _, positions, places, _ = run(last_token, num_tokens, page_table, torch.arange(6, device=device), BLOCK_SIZE)
    assert positions.tolist() == [0, 15, 16, 31, 32, 47]
    assert (places // BLOCK_SIZE).tolist() == page_table[range(6), [0, 0, 1, 1, 2, 2]].tolist()
    assert (places % BLOCK_SIZE).tolist() == [0, 15, 0, 15, 0, 15]


@RUNS
@pytest.mark.parametrize("num_tokens", [0, 3 * BLOCK_SIZE + 1])
def test_a_lane_whose_position_has_no_column_in_the_table_is_padding(run, num_tokens, device):
    last_token, counts, page_table = tables(device, 2, 3)
    counts[1] = num_tokens
    outputs = run(last_token, counts, page_table, torch.tensor([1, 0], device=device), BLOCK_SIZE)
    assert entries(outputs) == [PADDING, entry(0, last_token, counts, page_table)]


@RUNS
def test_all_entries_may_be_padding(run, device):
    lanes = torch.full((3,), -1, device=device)
    assert entries(run(*tables(device, 1, 1), lanes, BLOCK_SIZE)) == [PADDING] * 3


def test_tables_that_do_not_fit_each_other_are_our_mistake(device):
    last_token, num_tokens, page_table = tables(device, 4, 2)
    lanes = torch.zeros(1, device=device, dtype=torch.int64)
    assert entries(step_inputs(last_token, num_tokens, page_table, lanes)) == [
        entry(0, last_token, num_tokens, page_table)
    ]
    for wrong in (
        (last_token[:2], num_tokens, page_table, lanes),
        (last_token, num_tokens.int(), page_table, lanes),
        (last_token, num_tokens, page_table.long(), lanes),
        (last_token, num_tokens, page_table[:, :1], lanes),
        (last_token, num_tokens, page_table, lanes[None]),
    ):
        with pytest.raises(AssertionError):
            step_inputs(*wrong)
