"""The profile run: the largest steps there can be, whatever the context is. On a CPU, where nothing is measured."""

import pytest
import torch

from minserve.kernels.decode_attention import FEW_SPLITS, choose_min_keys, choose_splits
from minserve.runner import warmup
from minserve.runner.prefill import FlashShapes
from minserve.spec.draft import Drafter, NoDrafter
from tests.engine.heads import write_head
from tests.engine.tiny import CONFIG, tiny_engine


@pytest.fixture
def runs(monkeypatch):
    """Both steps are run once; each counts as a megabyte."""
    names = []

    def run(function, device):
        function()
        names.append(function.__name__)
        return 2**20

    monkeypatch.setattr(warmup, "_peak_bytes", run)
    return names


@pytest.mark.parametrize("num_tokens", [16, 512, 600, 5000])
@pytest.mark.parametrize("fixed_shapes", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_largest_steps_run_also_where_the_context_is_shorter_than_a_steps_tokens(
    tmp_path, runs, num_tokens, fixed_shapes, num_drafts
):
    engine = tiny_engine(tmp_path, draft_path=str(write_head(tmp_path / "head")), draft_window=64)
    model, head = engine._runner._model, engine._runner._drafter._head
    num_bytes = warmup.workspace_bytes(
        model,
        (lambda lanes: Drafter(head, lanes, 64)) if num_drafts else (lambda lanes: NoDrafter()),
        torch.empty(0),
        num_tokens=num_tokens,
        num_lanes=4,
        num_drafts=num_drafts,
        shapes=FlashShapes.for_chunks_of(num_tokens) if fixed_shapes else None,
    )
    assert runs == ["prefill", "decode_step"]
    assert num_bytes > 2 * 2**20


def test_chunks_fill_the_step_as_far_as_lanes_and_contexts_go():
    def spans(num_tokens, **where):
        chunks = warmup._longest_chunks(num_tokens, 4, CONFIG["max_position_embeddings"], **where)
        assert [chunk.lane for chunk in chunks] == list(range(len(chunks)))
        return [(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]

    assert spans(100, at_the_end=False) == [(0, 100)]
    assert spans(100, at_the_end=True) == [(412, 512)]
    assert spans(1100, at_the_end=True) == [(0, 512), (0, 512), (436, 512)]
    assert spans(9000, at_the_end=True) == [(0, 512)] * 4


def test_the_attention_of_short_chunks_is_compiled_for_every_way_to_split_it(tmp_path, monkeypatch):
    engine = tiny_engine(tmp_path)
    found = []
    monkeypatch.setattr(warmup, "decode_attention", lambda q, kv, batch: found.append((len(q), len(batch.lanes))))
    warmup.compile_tiles(engine._runner._context)
    assert [rows // tiles for rows, tiles in found] == [16] * 3
    splits = [choose_splits(tiles * 8, 40960, choose_min_keys(tiles * 8, 132), 132) for _, tiles in found]
    assert splits[0] > FEW_SPLITS >= splits[1] > splits[2] == 1
