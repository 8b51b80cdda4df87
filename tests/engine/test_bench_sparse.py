"""The benchmark of sparse requests runs what it says: on a tiny model, whose counters are known beforehand."""

import json
from functools import partial

import pytest
import torch

from minserve.lookahead.pipeline import Lookahead
from minserve.models.config import ModelConfig
from tools.sparse_bench import plots, rig
from tools.sparse_bench.command import main
from tools.sparse_bench.drive import MEASURED, NONE, WORST, Drafts, Drive, Lengths, Point
from tools.sparse_bench.luck import chance_for
from tools.sparse_bench.points import FIT, Place
from tools.sparse_bench.rival import Variant, variants
from tools.sparse_bench.sizes import Sizes
from tools.workload import SHAPES

QUICK = ["--config", "tiny", "--device", "cpu", "--context", "512", "--requests", "2", "--windows", "1"]
LAYERS, KV_HEADS, CAP = 3, 2, 2


def bench(monkeypatch, tmp_path, *flags):
    """The rows of a run."""
    monkeypatch.setattr("sys.argv", ["bench_sparse", *QUICK, "--out", str(tmp_path), *flags])
    assert main() == 0
    return [json.loads(line) for line in (tmp_path / "bench_sparse.jsonl").read_text().splitlines()]


def test_every_head_takes_its_cap_in_the_worst_case_and_nothing_without_drift(monkeypatch, tmp_path, capsys):
    rows = bench(monkeypatch, tmp_path, "--steps", "4", "--warm-up", "2")
    printed = capsys.readouterr().out
    assert [row["drift"] for row in rows] == [NONE, WORST, MEASURED]
    none, worst, _ = rows
    assert (none["pieces_step"], none["exposed_ms"]) == (0, 0)
    assert worst["pieces_step"] == 2 * LAYERS * KV_HEADS * CAP
    assert worst["caps_full"] == 1
    assert worst["exposed_ms"] == worst["step_ms"] - none["step_ms"]
    assert {row["tokens_step"] for row in rows} == {1}
    piece_bytes = 2 * 16 * 64 * 4
    assert worst["link_bytes_token"] == LAYERS * KV_HEADS * CAP * piece_bytes
    assert "caps full" in printed
    assert printed.count("minserve") == 3
    assert "many to one" in printed
    assert "NOT" not in printed


def test_drafts_are_right_as_often_as_asked(monkeypatch, tmp_path):
    flags = ["--drift", WORST, "--drafts", "0,0", "2,1@2", "3,2@1", "--steps", "3", "--warm-up", "1"]
    rows = bench(monkeypatch, tmp_path, *flags)
    assert [row["tokens_step"] for row in rows] == [1, 2, 1]
    assert all(row["caps_full"] == 1 for row in rows)
    assert chance_for(1.7, 1) == pytest.approx(0.7)
    chance = chance_for(2.3, 3)
    assert chance + chance**2 + chance**3 == pytest.approx(1.3)


def test_what_is_fetched_is_what_the_sources_say_layer_by_layer_as_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(rig, "Lookahead", partial(Lookahead, layers_at_once=1))
    torch.manual_seed(1)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"].config))
    base = rig.Base(tmp_path, torch.device("cpu"), has_head=False, host_bytes=2**20)
    own = rig.Rig(base, base.sizes(512, 8), num_lanes=3, most_drafts=0)
    point = Point(3, 512, WORST, CAP, Drafts(0, 0, 1.0), fixed=True)
    measured = Drive(own, point, Lengths(warm_up=2, windows=1, steps=20)).run()
    assert (measured.full_caps, measured.late) == (1, 0)
    sets = own.sets
    num_fetched = 0
    for layer, lane, head, slot in torch.cartesian_prod(*(torch.arange(n) for n in (LAYERS, 3, KV_HEADS, 8))).tolist():
        block = int(sets.maps.slot_block[layer, lane, head, slot])
        assert sets.maps.block_slot[layer, lane, head, block] == slot
        page = own.pages.kv[layer, own.page_table[lane][slot], head]
        num_fetched += torch.equal(page, base.host.kv[sets.sources[lane, block], layer, head])
    # Block 0 stays in its slot, and of the others only what left the ring may not have come from the host.
    assert num_fetched > LAYERS * 3 * KV_HEADS * 5


def test_as_many_requests_fit_as_have_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"].config))
    sizes = Sizes(ModelConfig.from_folder(tmp_path), torch.float32, 0, draft_bytes=1000, context=1024, num_slots=8)
    for memory in (0, 10**7, 10**8):
        most = sizes.num_fitting(memory)
        assert sizes.memory(max(most, 1)) <= memory or most == 0
        assert sizes.memory(most + 1) > memory
    block = 2 * 16 * 64 * 4 * LAYERS * KV_HEADS
    assert (sizes.block_bytes, sizes.digest_bytes) == (block, block // 8 // 2)
    pages_and_digests = (8 + 3) * block + 64 * block // 16 + 1000
    assert sizes.memory(101) - sizes.memory(100) > pages_and_digests


def test_places_and_drafts_are_read_as_written():
    assert Place.parse("96x16K") == (16384, 96)
    assert Place.parse("fitx500") == (500, FIT)
    assert Drafts.parse("2,1@1.7") == (2, 1, 1.7)
    assert str(Drafts.parse("2,1@1.7")) == "2,1@1.7"


def test_the_rival_gets_as_many_requests_as_its_memory_holds():
    [plain, half, *lucky] = variants(["bf16", "fp8", "drafts"], [Drafts(1, 0, 1.0), Drafts(2, 1, 1.7)])
    works = plain.works("qwen3-8b", [16384, 32768], 55 * 10**9)
    assert [work.requests for work in works] == [22, 11]
    assert [work.requests for work in half.works("qwen3-8b", [16384, 32768], 55 * 10**9)] == [45, 22]
    assert [each.drafts for each in lucky] == [Drafts(2, 1, 1.7)]
    assert Variant("x").flags() == {}


def test_both_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    ours = {"side": "minserve", "requests": 2, "context": 1024, "drafts": "1,0", "tokens_s": 100.0, "tokens_step": 1.0}
    ours |= {"read_bytes_token": 1e8, "link_bytes_token": 1e6}
    theirs = {"side": "vLLM", "requests": 1, "context": 1024, "tokens_s": 50.0, "read_bytes_token": 2e8}
    rows = [ours | {"drift": drift} for drift in (NONE, WORST, MEASURED)]
    paths = plots.draw([*rows, theirs], tmp_path)
    assert [path.stat().st_size > 5000 for path in paths] == [True, True]
