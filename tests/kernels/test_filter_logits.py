"""What find_cuts keeps is what filter_logits keeps, for every kind of row."""

import pytest
import torch

from minserve.kernels.filter_logits import filter_logits, find_cuts_triton

VOCAB = 40


def rows_of_logits(vocab=VOCAB):
    random = torch.Generator().manual_seed(0)
    spread = 3 * torch.randn(vocab, generator=random)
    holes = spread.clone()
    holes[::3] = -torch.inf
    tied = spread.round()
    tied[1::2] *= -1  # some of the zeros are negative, and equal to the others
    dominated = spread.clone()
    dominated[7] = 60.0
    return {
        "spread": spread,
        "holes": holes,
        "tied": tied,
        "flat": torch.zeros(vocab),
        "dominated": dominated,
        "far apart": spread.sign() * 10 ** (4 * spread),
    }


def kept_by_cuts(logits, temperature, top_k, top_p, min_p, tile, allowed=None):
    device, rows = logits.device, len(logits)
    cut, last_tie = find_cuts_triton(
        logits,
        torch.arange(rows, device=device),
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        allowed,
        tile,
    )
    x, ids = logits.float(), torch.arange(logits.shape[1], device=device)
    if allowed is not None:
        x = x.masked_fill(allowed == 0, -torch.inf)
    return ((x > cut[:, None]) | ((x == cut[:, None]) & (ids <= last_tie[:, None]))) & (x > -torch.inf)


def kept_by_reference(logits, temperature, top_k, top_p, min_p):
    rows, device = len(logits), logits.device
    top_k = torch.full((rows,), top_k, device=device)
    top_p, min_p = torch.full((rows,), top_p, device=device), torch.full((rows,), min_p, device=device)
    return filter_logits(logits.float() / temperature, top_k, top_p, min_p) > -torch.inf


# A tile that holds the whole row, and one of which a row takes three, where the search has to narrow first.
@pytest.mark.parametrize(
    ("tile", "top_k", "top_p", "min_p", "kinds"),
    [
        (64, 1, 1.0, 0.0, ("holes", "tied", "flat")),
        (64, 7, 1.0, 0.0, ("holes", "tied", "flat", "far apart")),
        (64, 0, 1e-9, 0.0, ("tied", "flat")),
        (64, 0, 0.0, 0.0, ("tied",)),
        (64, 1, 0.0, 0.0, ("spread", "tied")),
        (64, 0, 0.555, 0.0, ("spread", "flat", "dominated")),
        (64, 0, 1.0, 1.0, ("tied", "flat", "dominated")),
        (64, 0, 1.0, 0.05, ("spread", "holes", "tied")),
        (64, VOCAB + 7, 1.0, 0.0, ("spread",)),
        (64, 12, 0.8, 0.02, ("spread", "holes", "flat")),
        (16, 7, 1.0, 0.0, ("spread", "flat", "dominated")),
        (16, 35, 1.0, 0.0, ("holes",)),
        (16, 0, 0.9, 0.0, ("spread", "holes")),
        (16, 25, 0.9, 0.0, ("tied", "far apart")),
    ],
)
def test_the_cuts_keep_what_the_reference_keeps(tile, top_k, top_p, min_p, kinds, dtype, device):
    rows = rows_of_logits()
    logits = torch.stack([rows[kind] for kind in kinds]).to(device, dtype)
    options = (0.7, top_k, top_p, min_p)
    assert torch.equal(kept_by_cuts(logits, *options, tile), kept_by_reference(logits, *options))


def test_what_is_not_allowed_does_not_count(device):
    logits = torch.stack([rows_of_logits()["spread"]]).to(device)
    allowed = torch.ones(VOCAB, dtype=torch.uint8, device=device)
    allowed[logits[0].topk(5).indices[::2]] = 0
    options = (1.0, 4, 0.9, 0.0)
    expected = kept_by_reference(logits.masked_fill(allowed == 0, -torch.inf), *options)
    assert torch.equal(kept_by_cuts(logits, *options, 64, allowed), expected)


def test_rows_without_filters_greedy_rows_and_padding_have_no_cut(device):
    logits = torch.zeros(3, VOCAB, device=device)
    logits[:, 1] = 1.0
    lanes = torch.tensor([0, 1, -1], device=device)
    tables = ([1.0, 0.0], [0, 3], [1.0, 0.5], [0.0, 0.5])
    cut, last_tie = find_cuts_triton(logits, lanes, *(torch.tensor(table, device=device) for table in tables), None, 64)
    assert cut.tolist() == [-torch.inf] * 3
    assert last_tie.tolist() == [VOCAB] * 3


def test_the_rows_of_an_entry_are_filtered_as_their_lane_says(device):
    logits = torch.stack([rows_of_logits()[kind] for kind in ("spread", "holes", "flat", "spread", "tied", "holes")])
    logits = logits.to(device)
    lanes = torch.tensor([1, -1, 0], device=device)
    tables = ([0.5, 1.0], [3, 0], [1.0, 0.6], [0.0, 0.0])
    tables = [torch.tensor(table, device=device) for table in tables]
    cuts, ties = find_cuts_triton(logits, lanes, *tables, None, 64)
    one_by_one = [find_cuts_triton(logits[i : i + 1], lanes[i // 2][None], *tables, None, 64) for i in range(6)]
    assert cuts.tolist() == [cut.item() for cut, _ in one_by_one]
    assert ties.tolist() == [tie.item() for _, tie in one_by_one]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("vocab", [151_936, 262_144, 50_257])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(50, 1.0, 0.0), (20_000, 1.0, 0.0), (0, 0.9, 0.0), (20, 0.95, 0.01), (1, 1.0, 0.0), (0, 1.0, 0.1)],
)
def test_rows_of_a_real_vocabulary(vocab, top_k, top_p, min_p, dtype, device):
    rows = rows_of_logits(vocab)
    logits = torch.stack([rows[kind] for kind in ("spread", "holes", "tied", "dominated")]).to(device, dtype)
    options = (0.7, top_k, top_p, min_p)
    kept, expected = kept_by_cuts(logits, *options, 8192), kept_by_reference(logits, *options)
    # The edge of top-p depends on the rounding of sums: tokens there have next to no probability between them.
    odd = (logits.float() / 0.7).softmax(-1).masked_fill(kept == expected, 0.0).sum(-1)
    assert odd.max().item() < (1e-5 if 0 < top_p < 1 else 1e-30)
