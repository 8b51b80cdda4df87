"""The benchmark of sparse requests runs what it says: on a tiny model, whose counters are known beforehand."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from minserve.kernels.fp8 import FP8
from minserve.kernels.fp8_blocks import dequantize_blocks
from minserve.lookahead.pipeline import Lookahead
from minserve.models.config import ModelConfig
from tools.sparse_bench import plots, rig, rival
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
    assert {(row["side"], row["host_dtype"]) for row in rows} == {("minserve", "float32")}
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


def test_host_blocks_in_8_bits_are_a_quarter_of_float32_on_the_link(monkeypatch, tmp_path, capsys):
    flags = ["--host-kv-dtype", "fp8", "--drift", WORST, "--steps", "20", "--warm-up", "2", "--fetch", "fixed"]
    [row] = bench(monkeypatch, tmp_path, *flags)
    assert (row["side"], row["host_dtype"], row["caps_full"]) == ("minserve, fp8 host", "float8_e4m3fn", 1)
    assert row["pieces_step"] == 2 * LAYERS * KV_HEADS * CAP
    assert row["link_bytes_token"] == LAYERS * KV_HEADS * CAP * 2 * 16 * 64
    assert "host blocks in float8_e4m3fn" in capsys.readouterr().out


def test_one_request_with_many_slots(monkeypatch, tmp_path):
    flags = ["--only", "1x4K", "--slots", "128", "--cap", "6", "--drift", WORST, "--steps", "4", "--warm-up", "2"]
    [row] = bench(monkeypatch, tmp_path, *flags)
    assert (row["requests"], row["context"], row["slots"], row["caps_full"]) == (1, 4096, 128, 1)
    assert row["pieces_step"] == LAYERS * KV_HEADS * 6


def test_the_rival_runs_alone_if_asked(monkeypatch, tmp_path, capsys):
    theirs = {"side": "vLLM", "requests": 1, "context": 16384, "tokens_s": 50.0, "tokens_step": 1.0}
    monkeypatch.setattr(rival, "run", lambda *args: iter([theirs | {"kv_bytes_step": 100}]))
    [row] = bench(monkeypatch, tmp_path, "--rival", "bf16", "--no-own")
    assert (row["side"], row["tokens_s"]) == ("vLLM", 50)
    assert "runs, about" not in capsys.readouterr().out


def test_drafts_are_right_as_often_as_asked(monkeypatch, tmp_path):
    flags = ["--drift", WORST, "--drafts", "0,0", "2,1@2", "3,2@1", "--steps", "3", "--warm-up", "1"]
    rows = bench(monkeypatch, tmp_path, *flags)
    assert [row["tokens_step"] for row in rows] == [1, 2, 1]
    assert all(row["caps_full"] == 1 for row in rows)
    assert chance_for(1.7, 1) == pytest.approx(0.7)
    chance = chance_for(2.3, 3)
    assert chance + chance**2 + chance**3 == pytest.approx(1.3)


@pytest.mark.parametrize("layers_at_once", [1, 2, LAYERS])
@pytest.mark.parametrize("host_dtype", [None, FP8], ids=["as in pages", "fp8"])
def test_what_is_fetched_is_what_the_sources_say(monkeypatch, tmp_path, host_dtype, layers_at_once):
    monkeypatch.setattr(rig, "Lookahead", partial(Lookahead, layers_at_once=layers_at_once))
    # Of 29 blocks 8 are held and 8 wanted anew: now and then that leaves a head fewer than its cap to fetch.
    torch.manual_seed(2)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"].config))
    base = rig.Base(tmp_path, torch.device("cpu"), has_head=False, host_bytes=2**20, host_dtype=host_dtype)
    own = rig.Rig(base, base.sizes(512, 8), num_lanes=3, most_drafts=0)
    point = Point(3, 512, WORST, CAP, Drafts(0, 0, 1.0), fixed=True)
    measured = Drive(own, point, Lengths(warm_up=2, windows=1, steps=20)).run()
    assert (measured.full_caps, measured.late) == (1, 0)
    sets, host = own.sets, base.host.kv
    if host_dtype is not None:
        assert base.host.scales is not None
        host = dequantize_blocks(host, base.host.scales, base.dtype)
        assert host.std() == pytest.approx(1, abs=0.1)
    num_fetched = 0
    for layer, lane, head, slot in torch.cartesian_prod(*(torch.arange(n) for n in (LAYERS, 3, KV_HEADS, 8))).tolist():
        block = int(sets.maps.slot_block[layer, lane, head, slot])
        assert sets.maps.block_slot[layer, lane, head, block] == slot
        page = own.pages.kv[layer, own.page_table[lane][slot], head]
        num_fetched += torch.equal(page, host[sets.sources[lane, block], layer, head])
    # Block 0 stays in its slot, and of the others only what left the ring may not have come from the host.
    assert num_fetched > LAYERS * 3 * KV_HEADS * 5


def test_as_many_requests_fit_as_have_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"].config))
    model, float32 = ModelConfig.from_folder(tmp_path), torch.float32
    sizes = Sizes(model, float32, float32, 0, draft_bytes=1000, context=1024, num_slots=8)
    for memory in (0, 10**7, 10**8):
        most = sizes.num_fitting(memory)
        assert sizes.memory(max(most, 1)) <= memory or most == 0
        assert sizes.memory(most + 1) > memory
    block = 2 * 16 * 64 * 4 * LAYERS * KV_HEADS
    # Of half of the coordinates of 16 keys, two numbers of a byte, and 2 bits for each key.
    digest = LAYERS * KV_HEADS * 32 * (2 + 16 // 4)
    assert (sizes.block_bytes, sizes.digest_bytes) == (block, digest)
    pages_and_digests = (8 + 3) * block + 64 * digest + 1000
    assert sizes.memory(101) - sizes.memory(100) > pages_and_digests
    fp8 = replace(sizes, host_dtype=FP8)
    assert (fp8.block_bytes, fp8.digest_bytes, fp8.piece_bytes) == (block, digest, sizes.piece_bytes // 4)
    scales = 64 * LAYERS * KV_HEADS * 2 * 4
    assert fp8.memory(101) - sizes.memory(101) == 101 * scales


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
