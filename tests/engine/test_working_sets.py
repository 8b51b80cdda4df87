"""The device's half of a sparse request: what its pages hold after every step, and what that makes of its logits."""

import random
from dataclasses import replace

import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.engine.plan import SparsePolicy
from minserve.kernels import rank_blocks
from minserve.kernels.build_digests import Digests
from minserve.kernels.fetch_accounts import SOONER, UNSETTLED_STEPS
from minserve.kernels.fp8 import FP8
from minserve.kernels.fp8_blocks import dequantize_blocks, quantize_blocks
from minserve.kernels.sparse_rows import RING
from minserve.lookahead.order import Order
from minserve.memory.working_sets import WorkingSets
from minserve.models.config import ModelConfig
from tests.engine.heads import write_head
from tests.engine.tiny import CONFIG, tiny_engine
from tests.kernels.working_sets import slow, unpack_levels
from tools.sparse_lab import SparseLab

# More heads than the tiny model's, norms of queries and keys, and slow coordinates that RoPE turns in so short a text:
# without these all blocks are alike to them.
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3}
MODEL = {**CONFIG, **SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "rope_theta": 30.0}
PROMPT = [random.Random(5).randrange(96) for _ in range(203)]
NEW = 90


def lab(folder, num_slots, num_drafts=0, **options):
    options = {"sparse": "above", "host_kv": 2**23, "kv_cache_memory": 2**23, "max_num_seqs": 2} | options
    if num_drafts:
        options["draft_path"] = str(write_head(folder / "head", hidden=64))
        options["num_draft_tokens"] = num_drafts
    return SparseLab(tiny_engine(folder, MODEL, working_set_blocks=num_slots, **options), num_drafts)


def policy(**fields):
    return SparsePolicy(**{"looks_ahead": False, "num_verified": 0, "cap": 1000, "retry_above": None, **fields})


def texts_and_logits(own, *policies):
    """Of a resident lane that becomes sparse after two steps, if there is a policy. Checks it after every step."""
    own.read(PROMPT, NEW)
    logits, fetched, num_again = [], [], 0
    for number in range(10**6):
        if len(own.token_ids) >= len(PROMPT) + NEW - 9:
            break
        if number == 2 and policies:
            own.demote(policies[0])
        step = own.decode()
        logits.append(own.sampler.logits[0])
        if number >= 2 and policies:
            fetched.append(step.fetched)
            num_again += not step.tokens
            check(own)
            assert step.fetched.hits >= 0
            assert step.fetched.misses >= step.fetched.cut >= 0
            assert step.fetched.asked >= step.fetched.surprises >= 0
    return own.token_ids, logits, fetched, num_again


def check(own):
    """Maps are inverse, pages hold the blocks that the maps say, host blocks and digests are those of the text."""
    sets = own.sets
    start, table = int(sets.ring_start[0]), sets.page_table[0].long()
    num_layers, _, kv_heads, num_slots = sets.maps.slot_block.shape
    num_filled = min(start, num_slots)
    for layer in range(num_layers):
        for head in range(kv_heads):
            held = sets.maps.slot_block[layer, 0, head].tolist()
            blocks = held[:num_filled]
            assert held[num_filled:] == [-1] * (num_slots - num_filled), "the first slots are filled, no others"
            assert len(set(blocks)) == num_filled, "a block is attended twice"
            assert set(blocks) <= set(range(start)), "a block is in a slot and in the ring"
            assert not start or 0 in blocks, "block 0 was evicted"
            inverse = sets.maps.block_slot[layer, 0, head].tolist()
            assert {block: slot for block, slot in enumerate(inverse) if slot >= 0} == {
                block: slot for slot, block in enumerate(blocks)
            }
            pages = sets.kv[layer, table[:num_filled], head]
            check_stored(sets, pages, (sets.host_table[0, blocks].long(), layer, head))
    hosts = sets.host_table[0, :start].long()
    check_digests(sets, hosts)
    for block in range(start, (len(own.token_ids) - 1) // BLOCK_SIZE):
        page = table[num_slots + block % RING]
        if int(sets.host_table[0, block]) >= 0:
            check_stored(sets, sets.kv[:, page], int(sets.host_table[0, block]))


def check_stored(sets, blocks, where):
    """That these are the host blocks there; in 8 bits, that they would be: what never was there is not rounded."""
    stored = sets.host[where]
    if sets.host_scales is not None:
        blocks, scales = quantize_blocks(blocks.contiguous())
        torch.testing.assert_close(scales, sets.host_scales[where], rtol=1e-6, atol=0)
        blocks, stored = blocks.view(torch.uint8), stored.view(torch.uint8)
    assert torch.equal(blocks, stored), "a page holds another block than its map says"


def check_digests(sets, hosts):
    """That these blocks have theirs, of what is not rounded yet: in 8 bits, of something that would be the block."""
    content, error = sets.host[hosts], 0.0
    if (scales := sets.host_scales) is not None:
        content = dequantize_blocks(content, scales[hosts], sets.kv.dtype)
    # [blocks, layers, kv_heads, 16 tokens, slow coordinates]
    keys = content[:, :, :, 0, :, slow(content.shape[-1])].float()
    digests = Digests(*(table[:, hosts].transpose(0, 1) for table in sets.digests))
    extremes = digests.extremes.float().unbind(3)
    for found, extreme in zip(extremes, (keys.amin(3), keys.amax(3))):
        if scales is not None:
            error = torch.maximum(extreme.abs() / 16, scales[hosts][:, :, :, 0, None] / 1024) * 1.00001
        least, most = ((extreme + sign * error).clamp(-448, 448).to(FP8).float() for sign in (-1, 1))
        assert ((found >= least) & (found <= most)).all()
    least, most = (extreme.unsqueeze(3) for extreme in extremes)
    levels, span = unpack_levels(digests.keys, keys.shape[-1]), most - least
    off = (least + span * levels / 3 - keys).abs()
    if scales is not None:
        error = torch.maximum(keys.abs() / 16, scales[hosts][:, :, :, 0, None, None] / 1024) * 1.00001
    # To the nearest level, but for what the extremes are rounded by, a sixteenth of themselves.
    assert (off <= span / 6 + torch.maximum(least.abs(), most.abs()) / 16 + error + 1e-6).all()


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_with_a_slot_for_every_block_the_text_is_the_dense_one(tmp_path, num_drafts):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    dense, dense_logits, _, _ = texts_and_logits(lab(tmp_path / "a", 24))
    own = policy(looks_ahead=num_drafts > 0, num_verified=num_drafts, retry_above=0.02)
    sparse, logits, fetched, num_again = texts_and_logits(lab(tmp_path / "b", 24, num_drafts), own)
    assert sparse == dense
    assert num_again == 0
    assert all(step.misses == step.surprises == 0 for step in fetched)
    if num_drafts == 0:
        torch.testing.assert_close(torch.stack(logits), torch.stack(dense_logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_slots", [1, 4, 9])
@pytest.mark.parametrize("cap", [1, 1000])
@pytest.mark.parametrize(("num_drafts", "num_verified"), [(0, 0), (1, 0), (3, 2), (3, 3)])
def test_pages_hold_what_the_maps_say_after_every_step(tmp_path, num_slots, cap, num_drafts, num_verified):
    own = policy(looks_ahead=num_drafts > 0, num_verified=num_verified, cap=cap)
    _, logits, fetched, _ = texts_and_logits(lab(tmp_path, num_slots, num_drafts), own)
    assert all(torch.isfinite(row).all() for row in logits)
    if num_slots == 4:
        assert any(step.misses > step.cut for step in fetched), "nothing was ever fetched"


def as_on_a_gpu(own, at_once):
    """Its background by so many layers at once, and in tensors of fixed width, without a look at what they hold."""
    order = replace(Order.of(own.kv.device, len(own.kv)), on_host=False)
    own._run_with(own.sets, recalls=own.lookahead.recalls, order=order, layers_at_once=at_once, max_entries=4)
    return own


@pytest.mark.parametrize(
    ("num_drafts", "fields", "miss_policy", "host", "at_once"),
    [
        (0, {"cap": 2}, "approximate", "auto", 1),
        (1, {"looks_ahead": True, "retry_above": 0.01, "cap": 1}, "retry", "auto", 2),
        (3, {"looks_ahead": True, "num_verified": 2, "retry_above": 0.005}, "retry", "fp8", 2),
        (0, {}, "recall", "auto", 2),
    ],
)
def test_a_background_of_few_layers_at_once_does_the_same_as_one_of_all(
    tmp_path, num_drafts, fields, miss_policy, host, at_once
):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    labs = [lab(tmp_path / name, 6, num_drafts, miss_policy=miss_policy, host_kv_dtype=host) for name in "ab"]
    as_on_a_gpu(labs[1], at_once)
    for own in labs:
        own.read(PROMPT, NEW)
        own.decode(), own.decode()
        own.demote(policy(**fields))
    num_again = 0
    for number in range(50):
        steps = [own.decode(refill=5 if number % 3 else 0, saved=9) for own in labs]
        assert steps[0] == steps[1]
        num_again += not steps[0].tokens
        for one, other in zip((*labs[0].sets.maps, labs[0].sets.by_layer), (*labs[1].sets.maps, labs[1].sets.by_layer)):
            assert torch.equal(one, other)
        check(labs[1])
    assert (num_again > 0) == (miss_policy == "retry")


def test_a_step_with_surprises_runs_again_once_and_fetches_what_is_worth_it(tmp_path, monkeypatch):
    """Of a tiny model's attention every block has its share, until so much is asked for that none has."""
    own, num_late = lab(tmp_path, 4), []
    own.read(PROMPT, NEW)
    own.decode(), own.decode()
    own.demote(policy(retry_above=0.0))
    for number in range(60):
        if number == 30:
            monkeypatch.setattr(rank_blocks, "LEAST_SHARE", 1.0)
        step = own.decode(refill=0)
        if step.fetched.surprises == 0:
            assert len(step.tokens) == 1
            continue
        assert step.tokens == [], "it has accepted a token without what it wanted"
        num_late.append((number < 30, int(own.sets.late[0]) > 0))
        before = len(own.token_ids)
        step = own.decode(refill=0)
        assert len(step.tokens) == 1, "it runs again once, not twice"
        assert len(own.token_ids) == before + 1
        check(own)
    assert set(num_late) == {(True, True), (False, False)}


def test_recall_has_all_that_a_row_wants_before_it_attends(tmp_path):
    """Each layer is ranked by its own query, so that the logits are those of exact top-K attention."""
    _, _, fetched, _ = texts_and_logits(lab(tmp_path, 4, miss_policy="recall"), policy())
    assert any(step.misses for step in fetched)
    assert all(step.surprises == 0 and step.cut == 0 for step in fetched)


def test_an_allowance_bounds_what_a_layer_fetches_and_is_saved_up(tmp_path):
    own = lab(tmp_path, 4)
    own.read(PROMPT, NEW)
    own.decode(), own.decode()
    own.demote(policy())
    num_layers, budget = MODEL["num_hidden_layers"], 0
    for number in range(60):
        refill = (0, 0, 1, 3)[number % 4]
        budget += refill * num_layers
        step = own.decode(refill=refill)
        budget -= step.fetched.misses - step.fetched.cut
        assert budget >= 0, "more was fetched than allowed"
        check(own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_tables_take_is_known_before_there_are_any(tmp_path, dtype):
    """A CPU keeps extremes in the pages' dtype, a GPU in 8 bits."""
    sets = lab(tmp_path, 4, dtype=str(dtype).removeprefix("torch.")).sets
    sizes = {"num_lanes": sets.num_lanes, "max_blocks": sets.host_table.shape[1], "num_slots": 4}
    sizes["num_host_blocks"] = sets.digests.extremes.shape[1]
    cpu, gpu = (
        WorkingSets.bytes_for(ModelConfig.from_folder(tmp_path), dtype, torch.device(name), **sizes)
        for name in ("cpu", "cuda")
    )
    assert cpu == sets.nbytes
    assert cpu - gpu == sets.digests.extremes.numel() * (dtype.itemsize - 1)


def test_a_lane_that_is_set_up_anew_is_resident(tmp_path):
    own = lab(tmp_path, 4)
    first = texts_and_logits(own)[0]
    texts_and_logits(own, policy())
    assert own.sets.sparse[0]
    assert texts_and_logits(own)[0] == first
    assert not own.sets.sparse[0]


@pytest.mark.parametrize(("share", "runs_again"), [(0.99, True), (1.01, False)])
def test_in_its_first_step_a_sparse_lane_runs_again_sooner(tmp_path, share, runs_again):
    """share: of what that step lacks, which it lacks again when it is done again."""
    own = lab(tmp_path, 4, 1)
    own.read(PROMPT, NEW)
    own.decode(), own.decode()
    start = own.snapshot()
    own.demote(policy(looks_ahead=True))
    own.decode()
    lacking = own.lookahead.background.lacking
    assert (lacking > 0, own.sets.since_retry[0] > UNSETTLED_STEPS) == (True, True)
    own.restore(start)
    own.demote(policy(looks_ahead=True, retry_above=share * lacking / SOONER))
    assert (not own.decode().tokens) == runs_again


def test_a_row_that_runs_again_has_all_that_was_worth_it_in_the_first_layer(tmp_path):
    """Where its query is the same, and all is worth it; also the block that has left the ring since, which the
    lookahead may not want."""
    own = lab(tmp_path, 4, 1)
    own.read(PROMPT, NEW)
    own.decode(), own.decode()
    own.demote(policy(looks_ahead=True, retry_above=0.0))
    num_again = 0
    for _ in range(120):
        ran_again = own.sets.since_retry[0].item() == 0
        before, start = int(own.sets.by_layer[0, 3]), int(own.sets.ring_start[0])
        own.decode()
        if ran_again:
            num_again += 1
            assert int(own.sets.by_layer[0, 3]) == before, f"the ring began at {start}"
        if len(own.token_ids) >= len(PROMPT) + NEW - 9:
            break
    assert num_again > 10
