"""A step's inputs from the lanes' tables: the reference and the kernel against a loop over the rows."""

import pytest
import torch

from minserve.kernels.step_inputs import WIDTH, step_inputs, step_inputs_reference, step_inputs_triton

RUNS = pytest.mark.parametrize("run", [step_inputs_reference, step_inputs_triton])
PADDING = (0, 0, -1, 0)
BLOCK_SIZE, MAX_DRAFTS = 16, 5
FAR = 10**6


def tables(device, num_lanes, max_blocks):
    """last_token, drafts, num_tokens, end and page_table; some lanes end in the middle of a step's rows, and pages are
    large, so that a product in 32 bits would show."""
    last_token = torch.randint(1, 150_000, (num_lanes,), device=device)
    drafts = torch.randint(1, 150_000, (num_lanes, MAX_DRAFTS), device=device)
    drafts[drafts % 4 == 0] = -1
    num_tokens = torch.randint(1, max_blocks * BLOCK_SIZE + 1, (num_lanes,), device=device)
    end = num_tokens + torch.randint(1, 8, (num_lanes,), device=device)
    page_table = torch.randint(2**28, 2**31 - 1, (num_lanes, max_blocks), device=device, dtype=torch.int32)
    return last_token, drafts, num_tokens, end, page_table


def row(lane, j, last_token, drafts, num_tokens, end, page_table):
    wanted = num_tokens[lane].item() - 1 + j
    position = min(wanted, end[lane].item() - 2)
    if lane < 0 or position >= page_table.shape[1] * BLOCK_SIZE:
        return PADDING
    token = last_token[lane].item() if j == 0 else max(drafts[lane, j - 1].item(), 0)
    place = page_table[lane, position // BLOCK_SIZE].item() * BLOCK_SIZE + position % BLOCK_SIZE
    return token, position, place if position == wanted else -1, position + 1


def rows(outputs):
    assert all(output.dtype == torch.int64 for output in outputs)
    return list(zip(*(output.tolist() for output in outputs), strict=True))


@RUNS
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("num_entries", [1, 15, 16, 17, 33, WIDTH + 1])
def test_a_row_is_what_its_lane_has(run, num_entries, num_drafts, device):
    state = tables(device, 40, 7)
    lanes = torch.randint(-1, 40, (num_entries,), device=device)
    expected = [row(lane, j, *state) for lane in lanes.tolist() for j in range(1 + num_drafts)]
    assert rows(run(*state, lanes, num_drafts, BLOCK_SIZE)) == expected


@RUNS
def test_a_position_lies_in_the_block_that_it_begins_or_ends(run, device):
    last_token, drafts, _, end, page_table = tables(device, 6, 3)
    num_tokens = torch.tensor([1, 16, 17, 32, 33, 48], device=device)
    end.fill_(FAR)
    lanes = torch.arange(6, device=device)
    _, positions, places, _ = run(last_token, drafts, num_tokens, end, page_table, lanes, 0, BLOCK_SIZE)
    assert positions.tolist() == [0, 15, 16, 31, 32, 47]
    assert (places // BLOCK_SIZE).tolist() == page_table[range(6), [0, 0, 1, 1, 2, 2]].tolist()
    assert (places % BLOCK_SIZE).tolist() == [0, 15, 0, 15, 0, 15]


@RUNS
def test_drafts_follow_the_last_token_and_none_is_token_0(run, device):
    last_token, drafts, num_tokens, end, page_table = tables(device, 1, 3)
    last_token[0], drafts[0, :3], num_tokens[0], end[0] = 5, torch.tensor([7, -1, 9]), 15, FAR
    lanes = torch.tensor([0], device=device)
    token_ids, positions, places, _ = run(last_token, drafts, num_tokens, end, page_table, lanes, 3, BLOCK_SIZE)
    assert token_ids.tolist() == [5, 7, 0, 9]
    assert positions.tolist() == [14, 15, 16, 17]
    assert (places // BLOCK_SIZE).tolist() == page_table[0, [0, 0, 1, 1]].tolist()


@RUNS
@pytest.mark.parametrize(("end", "positions"), [(22, [18, 19, 20, 20]), (20, [18, 18, 18, 18]), (19, [17, 17, 17, 17])])
def test_rows_behind_a_lane_s_end_are_stored_nowhere_and_see_no_further_than_it(run, end, positions, device):
    state = tables(device, 1, 2)
    state[2][0], state[3][0] = 19, end
    out = run(*state, torch.tensor([0], device=device), 3, BLOCK_SIZE)
    assert out[1].tolist() == positions
    assert out[2].lt(0).tolist() == [position != 18 + j for j, position in enumerate(positions)]
    assert out[3].tolist() == [position + 1 for position in positions]


@RUNS
@pytest.mark.parametrize(("num_tokens", "end"), [(0, FAR), (3 * BLOCK_SIZE + 1, FAR), (1, 1)])
def test_a_lane_whose_position_has_no_column_in_the_table_is_padding(run, num_tokens, end, device):
    state = tables(device, 2, 3)
    state[2][0], state[2][1], state[3][1] = 5, num_tokens, end
    outputs = run(*state, torch.tensor([1, 0], device=device), 1, BLOCK_SIZE)
    assert rows(outputs) == [PADDING] * 2 + [row(0, j, *state) for j in range(2)]


@RUNS
def test_all_entries_may_be_padding_and_lanes_may_have_no_drafts(run, device):
    last_token, drafts, num_tokens, end, page_table = tables(device, 1, 1)
    for lanes in ([-1, -1, -1], [0]):
        lanes = torch.tensor(lanes, device=device)
        outputs = run(last_token, drafts[:, :0].contiguous(), num_tokens, end, page_table, lanes, 0, BLOCK_SIZE)
        expected = [row(lane, 0, last_token, drafts, num_tokens, end, page_table) for lane in lanes.tolist()]
        assert rows(outputs) == expected


def test_tables_that_do_not_fit_each_other_are_our_mistake(device):
    last_token, drafts, num_tokens, end, page_table = state = tables(device, 4, 2)
    lanes = torch.zeros(1, device=device, dtype=torch.int64)
    assert rows(step_inputs(*state, lanes, 1)) == [row(0, j, *state) for j in range(2)]
    for wrong in (
        (last_token[:2], drafts, num_tokens, end, page_table, lanes, 1),
        (last_token, drafts[:2], num_tokens, end, page_table, lanes, 1),
        (last_token, drafts, num_tokens.int(), end, page_table, lanes, 1),
        (last_token, drafts, num_tokens, end[:1], page_table, lanes, 1),
        (last_token, drafts, num_tokens, end, page_table.long(), lanes, 1),
        (last_token, drafts, num_tokens, end, page_table[:, :1], lanes, 1),
        (last_token, drafts, num_tokens, end, page_table, lanes[None], 1),
        (last_token, drafts, num_tokens, end, page_table, lanes, MAX_DRAFTS + 1),
    ):
        with pytest.raises(AssertionError):
            step_inputs(*wrong)
