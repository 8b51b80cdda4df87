"""The drafter proposes what its head says of the whole text, computed anew; and keeps no more of it than it says."""

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.spec.draft_kv import DraftKV
from tests.engine.heads import Oracle, drafts_anew, write_head
from tests.engine.tiny import VOCAB, submit, tiny_engine


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize("chunk", [512, 18], ids=["whole", "in chunks"])
def test_drafts_are_those_of_the_whole_text(tmp_path, num_drafts, chunk):
    head = write_head(tmp_path / "head")
    engine = tiny_engine(
        tmp_path, draft_path=str(head), num_draft_tokens=num_drafts, max_num_seqs=2, max_num_batched_tokens=chunk
    )
    engine.submit(submit("a", [7 * i % VOCAB for i in range(45)], max_tokens=30, temperature=0.0))
    engine.submit(submit("b", [3, 1, 4], max_tokens=30, temperature=0.0))
    checked = 0
    with torch.inference_mode():
        while engine.has_work:
            engine.step()
            for request in engine._scheduler.running:
                if request.num_output_tokens:
                    proposed = engine._lanes.drafts[request.lane, :num_drafts].tolist()
                    assert proposed == drafts_anew(engine, request.token_ids, num_drafts)
                    checked += 1
    assert checked > 20


def test_rejected_and_accepted_drafts_leave_the_heads_view_right(tmp_path):
    """An oracle's drafts are accepted in runs of every length; what the head proposes afterwards is as if it had been
    computed anew."""
    plain = tiny_engine(tmp_path)
    plain.submit(submit("a", list(range(20)), max_tokens=40, temperature=0.0))
    text = []
    while plain.has_work:
        text += [token for delta in plain.step().deltas for token in delta.token_ids]
    engine = tiny_engine(tmp_path, draft_path=str(write_head(tmp_path / "head")), num_draft_tokens=3)
    drafter = engine._runner._drafter
    oracle = Oracle(engine, {"a": text}, share_right=0.7)
    engine._runner._drafter = engine._runner._decode._drafter = drafter
    propose = drafter.propose
    said = []

    def propose_both(aux, tokens, counts, lane_ids, num_proposals):
        propose(aux, tokens, counts, lane_ids, num_proposals)
        said.append(engine._lanes.drafts[lane_ids[0], :3].tolist())
        oracle.propose(aux, tokens, counts, lane_ids, num_proposals)

    drafter.propose = propose_both
    engine.submit(submit("a", list(range(20)), max_tokens=40, temperature=0.0))
    counts = set()
    with torch.inference_mode():
        while engine.has_work:
            deltas = engine.step().deltas
            counts |= {len(delta.token_ids) for delta in deltas}
            for request in engine._scheduler.running:
                assert said[-1] == drafts_anew(engine, request.token_ids, 3)
    assert {1, 4} < counts


class Sizes:
    """As much of a head's config as the pages need."""

    num_layers, num_kv_heads, head_dim = 1, 1, 1


WINDOW = 64


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 60, 64, 81, 100, 500, 511, 512])
@pytest.mark.parametrize("start", [0, 32, 40])
def test_a_row_sees_the_first_block_and_the_window_and_nothing_else(start, rows):
    """Every entry holds its own position; what a view lists is read back."""
    last = start + rows - 1
    kv = DraftKV(Sizes, num_lanes=3, window=WINDOW, dtype=torch.float32, device="cpu")
    lane = torch.tensor([1])
    kv.kv.fill_(-1)
    for position in range(start, last + 1):
        place = int(kv.places(lane, torch.tensor([position])))
        kv.kv[0, place // BLOCK_SIZE, 0, 0, place % BLOCK_SIZE, 0] = position
    view = kv.view(lane, torch.tensor([start]), torch.tensor([last]))
    seen = kv.kv[0, view.table[0].long(), 0, 0].flatten()[: last + 1 - int(view.shift)].int().tolist()
    oldest = max(last // BLOCK_SIZE - WINDOW // BLOCK_SIZE, start // BLOCK_SIZE) * BLOCK_SIZE
    expected = [at if at >= start else -1 for at in range(last + 1) if at >= oldest or (at < BLOCK_SIZE and start == 0)]
    assert seen == expected
    assert len(seen) >= min(last + 1 - start, WINDOW)


def test_what_a_lane_takes_does_not_grow_with_its_text():
    kv = DraftKV(Sizes, num_lanes=3, window=WINDOW, dtype=torch.float32, device="cpu")
    pages = kv.places(torch.tensor(2), torch.arange(100_000)) // BLOCK_SIZE
    assert pages.min() == 2 * kv.pages_per_lane
    assert pages.max() == 3 * kv.pages_per_lane - 1
    assert kv.pages_per_lane == 1 + WINDOW // BLOCK_SIZE + 2


def test_a_block_that_drafts_spill_into_is_never_one_of_the_window():
    kv = DraftKV(Sizes, num_lanes=1, window=WINDOW, dtype=torch.float32, device="cpu")
    lane, zero = torch.tensor([0]), torch.tensor([0])
    for last in range(40, 600):
        spilled = kv.places(lane, torch.tensor([last + BLOCK_SIZE])) // BLOCK_SIZE
        view = kv.view(lane, zero, torch.tensor([last]))
        num_blocks = -(-(last + 1 - int(view.shift)) // BLOCK_SIZE)
        assert int(spilled) not in view.table[0, :num_blocks].tolist()


def test_a_lane_that_changes_hands_keeps_nothing(tmp_path):
    engine = tiny_engine(tmp_path, draft_path=str(write_head(tmp_path / "head")), num_draft_tokens=3, max_num_seqs=1)
    drafter = engine._runner._drafter
    drafter._kv.kv.fill_(5.0)
    engine.submit(submit("a", [1, 2, 3], max_tokens=2, temperature=0.0))
    while engine.has_work:
        engine.step()
    assert not (drafter._kv.kv == 5.0).any()
