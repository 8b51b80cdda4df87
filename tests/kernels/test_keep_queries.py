"""Which rows' queries are kept, and where."""

import pytest
import torch

from minserve.kernels.keep_queries import Keep, keep_queries


@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 3, 64), (4, 9, 64), (2, 8, 128)])
def test_the_lookahead_row_and_the_normal_row_are_kept_for_each_lane(rows, heads, head_dim, device, dtype):
    lanes = torch.tensor([4, -1, 0, 6], device=device)
    ahead = torch.tensor([rows - 1, 0, 0, rows // 2], device=device)
    q = torch.randn(4 * rows, heads, head_dim, device=device).to(dtype)
    kept = torch.full((7, 2, heads, head_dim), torch.nan, device=device, dtype=dtype)
    keep_queries(q, Keep(ahead, lanes, kept))
    for entry, lane in enumerate(lanes.tolist()):
        if lane >= 0:
            assert torch.equal(kept[lane], torch.stack((q[entry * rows + int(ahead[entry])], q[entry * rows])))
    assert kept[[1, 2, 3, 5]].isnan().all()


def test_of_padding_alone_nothing_is_kept(device):
    lanes = torch.full((2,), -1, device=device)
    kept = torch.full((3, 2, 3, 64), 7.0, device=device)
    keep_queries(torch.zeros(4, 3, 64, device=device), Keep(torch.zeros_like(lanes), lanes, kept))
    assert (kept == 7).all()


def test_wrong_shapes_are_our_mistake(device):
    kept = torch.zeros(2, 2, 3, 64, device=device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    for tokens, *rest in ((3, 3, 64, torch.float32), (4, 3, 32, torch.float32), (4, 3, 64, torch.float16)):
        with pytest.raises(AssertionError):
            Keep(ids, ids, kept).check(tokens, *rest)
    with pytest.raises(AssertionError):
        Keep(ids.int(), ids, kept).check(4, 3, 64, torch.float32)
