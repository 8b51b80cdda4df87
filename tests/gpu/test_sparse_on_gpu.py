"""Working sets on a GPU do what they do on a CPU, whatever is late there. Run by hand: pytest -m gpu tests/gpu."""

import random
from contextlib import contextmanager

import pytest
import torch

from minserve.engine import build
from minserve.engine.plan import SparsePolicy
from minserve.kernels.fp8_blocks import quantize_blocks
from minserve.lookahead import order
from minserve.memory.copies import SyncCopies
from minserve.protocol import SamplingParams, Submit
from minserve.runner import attention
from minserve.runner.attention import DecodeAttention
from tests.engine.heads import write_head
from tests.engine.tiny import CONFIG, VOCAB, take_weights, tiny_engine
from tools.sparse_lab import SparseLab

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = {
    **CONFIG,
    "architectures": ["Qwen3ForCausalLM"],  # with norms of queries and keys, without which all blocks are alike to them
    "hidden_size": 128,
    "head_dim": 64,
    "rope_theta": 30.0,  # the slow coordinates, of which digests are made, turn in texts as short as these
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,  # three groups of the background's, the last a smaller one
    "max_position_embeddings": 4096,
}
NUM_SLOTS = 6
PROMPT = [random.Random(5).randrange(VOCAB) for _ in range(300)]
NEW = 80


COPIES = build._copies


@pytest.fixture(autouse=True, scope="module")
def copies_at_once():
    """Copies to host blocks end when they begin: when a request becomes sparse must not depend on what is late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_copies", lambda host, _: SyncCopies(host.move))
        yield


def engine(folder, device, num_drafts=0, like=None, num_slots=NUM_SLOTS, **options):
    """like: an engine whose weights it takes."""
    folder.mkdir()
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 6, "sparse": "above"} | options
    options = {"kv_cache_memory": 2**27, "host_kv": 2**25} | options
    if num_drafts:
        head = write_head(folder / "head", hidden=128, head_dim=64)
        options |= {"draft_path": str(head), "num_draft_tokens": num_drafts}
    made = tiny_engine(folder, MODEL, device=device, working_set_blocks=num_slots, **options)
    if like is not None:
        take_weights(made, like)
    return made


@pytest.mark.parametrize(
    ("num_drafts", "fields", "miss_policy"),
    [
        (0, {"cap": 2}, "approximate"),
        (1, {"looks_ahead": True, "retry_above": 0.003, "cap": 1}, "retry"),
        (3, {"looks_ahead": True, "num_verified": 2, "retry_above": 0.003}, "retry"),
        (0, {}, "recall"),
    ],
)
def test_maps_and_tokens_are_the_cpus_after_every_step(tmp_path, num_drafts, fields, miss_policy):
    on_cpu = engine(tmp_path / "cpu", "cpu", num_drafts, miss_policy=miss_policy)
    on_gpu = engine(tmp_path / "gpu", "cuda", num_drafts, on_cpu, miss_policy=miss_policy, enforce_eager=True)
    labs = [SparseLab(own, num_drafts) for own in (on_cpu, on_gpu)]
    policy = {"looks_ahead": False, "num_verified": 0, "cap": 1000, "retry_above": None} | fields
    for own in labs:
        own.read(PROMPT, NEW)
        own.decode(), own.decode()
        own.demote(SparsePolicy(**policy))
    num_again = num_fetched = 0
    for number in range(60):
        steps = [own.decode(refill=5 if number % 3 else 0, saved=9) for own in labs]
        assert steps[1] == steps[0]
        num_again += not steps[0].tokens
        num_fetched += steps[0].fetched.misses - steps[0].fetched.cut
        for one, other in zip(*((*own.sets.maps, own.sets.by_layer) for own in labs)):
            assert torch.equal(other.cpu(), one)
        check_pages(labs[1].sets)
    assert num_fetched
    assert (num_again > 0) == (miss_policy == "retry")


def test_blocks_that_come_in_8_bits_are_those_that_the_maps_say(tmp_path):
    """By themselves: a number that a CPU computes otherwise in its last bit may be rounded the other way."""
    own = SparseLab(engine(tmp_path / "gpu", "cuda", host_kv_dtype="fp8", enforce_eager=True))
    own.read(PROMPT, NEW)
    own.decode(), own.decode()
    own.demote(SparsePolicy(looks_ahead=False, num_verified=0, cap=2, retry_above=None))
    num_fetched = 0
    for _ in range(60):
        step = own.decode()
        num_fetched += step.fetched.misses - step.fetched.cut
        check_pages(own.sets)
    assert num_fetched


def check_pages(sets, lane=0):
    """Every slot of a sparse lane holds the block that its map says; in 8 bits, it would be the same host block."""
    torch.cuda.synchronize()
    for layer in range(len(sets.kv)):
        for head in range(sets.kv.shape[2]):
            blocks = sets.maps.slot_block[layer, lane, head]
            filled = (blocks >= 0).nonzero()[:, 0]
            pages = sets.kv[layer, sets.page_table[lane, filled].long(), head]
            hosts = sets.host_table[lane, blocks[filled].long()].long()
            stored = sets.host[hosts.cpu(), layer, head]
            if sets.host_scales is not None:
                pages, scales = quantize_blocks(pages)
                torch.testing.assert_close(scales, sets.host_scales[hosts, layer, head], rtol=1e-6, atol=0)
                pages, stored = pages.view(torch.uint8), stored.view(torch.uint8)
            assert torch.equal(pages.cpu(), stored), (lane, layer, head, blocks[filled].tolist())


def traffic():
    """(step at which it comes, request): batches of all sizes, prompts read between, and nobody sparse at times.

    What prompts share ends within a block: a whole prompt's last block is computed by each, with other last bits, of
    which the host tier keeps one."""
    rng = random.Random(8)
    shared = [rng.randrange(VOCAB) for _ in range(90)]
    for number in range(14):
        size = rng.choice([20, 150, 260, 420, 420])
        prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(size))][-size:] if number % 3 else shared[: size // 2]
        params = SamplingParams(max_tokens=rng.randint(5, 70), temperature=0.8, seed=number, ignore_eos=True)
        yield (
            rng.randint(0, 120) * (number % 4 > 0),
            Submit(request_id=str(number), prompt_token_ids=prompt, params=params),
        )


def texts(own, check=lambda step: None):
    """Tokens, and what was fetched, of each request. check: called after every step."""
    waiting = sorted(traffic(), key=lambda entry: entry[0])
    found = {request.request_id: [] for _, request in waiting}
    sparse, step = {}, 0
    while waiting or own.has_work:
        while waiting and waiting[0][0] <= step:
            own.submit(waiting.pop(0)[1])
        for delta in own.step().deltas if own.has_work else ():
            found[delta.request_id] += delta.token_ids
            sparse[delta.request_id] = delta.sparse
        check(step)
        step += 1
    own.check()
    return found, sparse


@contextmanager
def late(monkeypatch, place, cycles, seed=0):
    """Work at one place begins late, now and then. Graphs that are recorded meanwhile have that in them."""
    rng = random.Random(seed)

    def delayed(function):
        def call(*args, **kwargs):
            if rng.random() < 0.4:
                torch.cuda._sleep(rng.randrange(cycles))
            return function(*args, **kwargs)

        return call

    def delayed_inside(function):
        @contextmanager
        def call(*args):
            with function(*args):
                if rng.random() < 0.4:
                    torch.cuda._sleep(rng.randrange(cycles))
                yield

        return call

    streams = order._CudaStreams
    with monkeypatch.context() as patch:
        if place in ("foreground", "all"):
            patch.setattr(DecodeAttention, "__call__", delayed(DecodeAttention.__call__))
        if place in ("attention", "all"):  # behind the queries, of which the background knows already
            patch.setattr(attention, "decode_attention", delayed(attention.decode_attention))
        for name in ("background", "fetching", "finishing"):
            if place in (name, "all"):
                patch.setattr(streams, name, delayed_inside(getattr(streams, name)))
        yield


@pytest.fixture(scope="module")
def undelayed(tmp_path_factory):
    """For each kind of engine: itself, and what it says."""
    made = {}

    def get(num_drafts, **options):
        key = (num_drafts, *sorted(options.items()))
        if key not in made:
            own = engine(tmp_path_factory.mktemp("plain") / "engine", "cuda", num_drafts, **options)
            made[key] = own, texts(own)
            assert sum(usage is not None and usage.misses > 0 for usage in made[key][1][1].values()) > 5
        return made[key]

    return get


@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        *((place, "float32") for place in ("foreground", "attention", "background", "fetching", "finishing", "all")),
        ("all", "bfloat16"),
    ],
)
@pytest.mark.parametrize(("num_drafts", "verify"), [(0, 0), (3, 2)])
def test_nothing_that_is_late_changes_a_bit(tmp_path, undelayed, monkeypatch, place, dtype, num_drafts, verify):
    options = {"run_ahead": 1, "verify_drafts": verify, "dtype": dtype}
    plain, expected = undelayed(num_drafts, **options)
    with late(monkeypatch, place, cycles=400_000, seed=num_drafts):
        own = engine(tmp_path / "late", "cuda", num_drafts, plain, **options)
        assert texts(own) == expected


@pytest.mark.parametrize(("num_drafts", "verify"), [(0, 0), (1, 0), (3, 2)])
@pytest.mark.parametrize("machine", [{"enforce_eager": True, "run_ahead": 0}, {"run_ahead": 0}, {"run_ahead": 1}])
def test_with_a_slot_for_every_block_answers_equal_the_cpus_dense_ones(tmp_path, num_drafts, verify, machine):
    """With fewer, a score that differs in its last bit may be another block, and so another text."""
    on_cpu = engine(tmp_path / "cpu", "cpu", sparse="never")
    on_gpu = engine(tmp_path / "gpu", "cuda", num_drafts, on_cpu, num_slots=40, verify_drafts=verify, **machine)
    found, sparse = texts(on_gpu)
    assert found == texts(on_cpu)[0]
    assert sum(usage is not None for usage in sparse.values()) > 5


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_with_copies_beside_the_steps_pages_hold_what_the_maps_say(tmp_path, monkeypatch, num_drafts):
    monkeypatch.setattr(build, "_copies", COPIES)
    own = engine(tmp_path / "engine", "cuda", num_drafts, run_ahead=1)
    num_checked = 0

    def check(step):
        nonlocal num_checked
        if step % 7 == 0:
            sets = own._runner._steps.lookahead.sets
            torch.cuda.synchronize()
            lanes = [r.lane for r in own._scheduler.running if r.policy is not None and sets.sparse[r.lane]]
            for lane in lanes:
                check_pages(sets, lane)
            num_checked += len(lanes)

    texts(own, check)
    assert num_checked > 20
