"""The engine as a GPU runs it, with Triton's interpreter in place of the GPU.

Every kernel, padded batches and recorded steps, prefill in fixed shapes: the same answers as by the torch references.
Only cuDNN's attention and the CUDA graphs themselves have stand-ins.
"""

import random
import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import msgspec
import pytest
import torch

from minserve.config import BLOCK_SIZE
from minserve.kernels import fetch_blocks as kernels_that_fetch
from minserve.kernels.accept_drafts import accept_drafts_triton
from minserve.kernels.adjust_logits import adjust_logits_triton, count_tokens_triton
from minserve.kernels.build_digests import build_digests_triton
from minserve.kernels.decode_attention import DecodeBatch, decode_attention_triton
from minserve.kernels.fetch_accounts import count_fetches_triton, take_given_triton
from minserve.kernels.fetch_blocks import fetch_blocks_triton
from minserve.kernels.gather_pages import gather_keys_triton
from minserve.kernels.merge_attention import merge_attention_triton
from minserve.kernels.norm_rope_store import norm_rope_store_triton
from minserve.kernels.rank_blocks import rank_blocks_triton
from minserve.kernels.retire_block import retire_block_triton
from minserve.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from minserve.kernels.sampling import draw_triton
from minserve.kernels.score_blocks import score_blocks_triton
from minserve.kernels.score_keys import score_keys_triton
from minserve.kernels.select_blocks import select_blocks_triton
from minserve.kernels.shortlist_blocks import shortlist_blocks_triton
from minserve.kernels.silu_mul import silu_mul_triton
from minserve.kernels.sparse_rows import begin_rows_triton
from minserve.kernels.step_inputs import step_inputs_triton
from minserve.lookahead.order import Order
from minserve.lookahead.pipeline import Lookahead
from minserve.runner.decode import StepKind
from minserve.runner.graphs import DecodeGraphs
from minserve.runner.prefill import FlashShapes
from minserve.text import grammars
from minserve.text.tokenizer import Tokenizer
from tests.api.tiny import write_model_folder
from tests.engine.heads import write_head
from tests.engine.tiny import CONFIG, VOCAB, finish, submit, tiny_engine

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real thing"),
    # The interpreter's unsigned integers wrap around aloud, and padding rows hold whatever was in the memory.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]

MODEL = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 48, "head_dim": 64, "rope_theta": 30.0}


def device_batch(page_table, lanes, lengths, kv):
    """What `decode_batch` makes on a GPU."""
    return DecodeBatch(page_table, lanes, lengths, None, torch.zeros(len(lanes) * kv.shape[1], dtype=torch.int32))


KERNELS = {
    "minserve.models.layers": {
        "rms_norm": rms_norm_triton,
        "add_rms_norm": add_rms_norm_triton,
        "silu_mul": silu_mul_triton,
    },
    "minserve.runner.attention": {
        "norm_rope_store": norm_rope_store_triton,
        "decode_batch": device_batch,
        "decode_attention": decode_attention_triton,
    },
    "minserve.runner.prefill": {
        "decode_batch": device_batch,
        "decode_attention": decode_attention_triton,
        "norm_rope_store": norm_rope_store_triton,
        "gather_keys": gather_keys_triton,
        "merge_attention": merge_attention_triton,
    },
    "minserve.spec.draft": {
        "norm_rope_store": norm_rope_store_triton,
        "decode_batch": device_batch,
        "decode_attention": decode_attention_triton,
        "draw": draw_triton,
    },
    "minserve.runner.decode": {"step_inputs": step_inputs_triton},
    "minserve.runner.sampler": {
        "adjust_logits": adjust_logits_triton,
        "draw": draw_triton,
        "accept_drafts": accept_drafts_triton,
        "count_tokens": count_tokens_triton,
    },
}


SPARSE_KERNELS = {
    "minserve.lookahead.pipeline": {
        "begin_rows": partial(begin_rows_triton, block_size=BLOCK_SIZE),
    },
    "minserve.runner.attention": {"norm_rope_store": norm_rope_store_triton},
    "minserve.runner.sampler": {"accept_drafts": accept_drafts_triton},
    "minserve.lookahead.layers": {
        "rank_blocks": rank_blocks_triton,
        "select_blocks": select_blocks_triton,
        "fetch_blocks": fetch_blocks_triton,
        "retire_block": retire_block_triton,
    },
    "minserve.kernels.score_keys": {
        "score_blocks": score_blocks_triton,
        "shortlist_blocks": shortlist_blocks_triton,
        "score_keys": score_keys_triton,
    },
    "minserve.memory.working_sets": {"build_digests": build_digests_triton},
    "minserve.kernels.fetch_accounts": {
        "take_given_reference": take_given_triton,
        "count_fetches_reference": count_fetches_triton,
    },
}


class Again:
    """A recorded function, done again by calling it."""

    def __init__(self, function):
        self.replay = function
        function()


@contextmanager
def triton_kernels(kernels=KERNELS):
    """Triton's kernels where a GPU would run them."""
    with ExitStack() as stack:
        for module, names in kernels.items():
            stack.enter_context(patch.multiple(module, **names))
        yield


def compiled_engine(folder, num_drafts, max_lanes=5, **options):
    """An engine whose steps are recorded and padded, and whose prefill has fixed shapes."""
    if num_drafts:
        options |= {"draft_path": str(write_head(folder / "head", hidden=48, head_dim=64)), "draft_window": 64}
        options["num_draft_tokens"] = num_drafts
    engine = tiny_engine(folder, MODEL, max_num_seqs=max_lanes, max_num_batched_tokens=24, **options)
    runner = engine._runner
    if (lookahead := runner._steps.lookahead) is not None:
        order = replace(Order.of(lookahead.sets.kv.device, len(lookahead.sets.kv)), on_host=False)
        runner._steps.lookahead = Lookahead(
            lookahead.sets, recalls=False, max_entries=max_lanes, order=order, layers_at_once=2
        )
    graphs = DecodeGraphs(
        runner._decode,
        Again,
        Again,
        max_lanes=max_lanes,
        most_drafts=num_drafts,
        vocab_size=VOCAB,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    graphs.capture([StepKind(num_drafts, num_drafts)], lambda *_: None)
    runner._decode, runner._shapes = graphs, FlashShapes.for_chunks_of(24)
    return engine


SPARSE = {"sparse": "above", "sparse_above": 40, "host_kv": 2**22, "working_set_blocks": 3}


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_recorded_backgrounds_of_sparse_requests_give_the_answers_of_the_references(tmp_path, num_drafts):
    """Rows alike: with a few slots a text depends on what else the drafts have had fetched."""
    options = SPARSE | {"run_ahead": 1, "verify_drafts": 1 if num_drafts else 0, "max_lanes": 2}
    with triton_kernels(SPARSE_KERNELS), patch.object(kernels_that_fetch, "PROGRAMS", 2):
        compiled = compiled_engine(tmp_path, num_drafts, **options)
        found = finish(compiled, *long_requests())
    (tmp_path / "b").mkdir()
    expected = finish(compiled_engine(tmp_path / "b", num_drafts, **options), *long_requests())
    for name, deltas in expected.items():
        assert deltas[-1].sparse is not None
        assert deltas[-1].sparse.misses > 0, "all of it is in slots"
        assert found[name][-1].sparse == deltas[-1].sparse
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert [token for delta in found[name] for token in delta.token_ids] == tokens
    compiled.check()


def long_requests():
    rng = random.Random(3)
    for number in range(2):
        prompt = [rng.randrange(VOCAB) for _ in range((75, 95)[number])]
        yield submit(str(number), prompt, max_tokens=12, temperature=0.8, seed=number)


def requests():
    rng = random.Random(1)
    for number in range(6):
        options = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.8, "top_k": 20, "seed": 3},
            {"temperature": 1.0, "min_p": 0.05, "seed": 4, "presence_penalty": 0.7, "repetition_penalty": 1.3},
            {"temperature": 0.0, "logit_bias": {5: 30.0, 6: -80.0}, "min_tokens": 3, "stop_token_ids": [5]},
        ][number % 4]
        prompt = [rng.randrange(VOCAB) for _ in range([1, 50, 17, 16, 33, 20][number])]
        yield submit(str(number), prompt, max_tokens=4, logprobs=2, **options)


def answers(engine):
    found = finish(engine, *requests())
    tokens = {name: [token for delta in deltas for token in delta.token_ids] for name, deltas in found.items()}
    logprobs = {name: [entry.logprob for delta in deltas for entry in delta.logprobs] for name, deltas in found.items()}
    return tokens, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_kernels_recorded_steps_and_fixed_shapes_give_the_answers_of_the_references(tmp_path, num_drafts):
    tokens, logprobs = answers(tiny_engine(tmp_path, MODEL))
    with triton_kernels():
        compiled_tokens, compiled_logprobs = answers(compiled_engine(tmp_path, num_drafts, run_ahead=1))
    assert compiled_tokens == tokens
    for name, own in logprobs.items():
        assert compiled_logprobs[name] == pytest.approx(own, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_masks_of_grammars_reach_the_kernels_beside_steps_that_run_ahead(tmp_path, num_drafts):
    own = grammars.canonical(grammars.alone(grammars.regex_part(r"[a-c]{2,4}-\d{2}")))
    bound = [
        msgspec.structs.replace(submit(f"bound-{number}", [number] * 9, max_tokens=12, **options), grammar=own)
        for number, options in enumerate(
            ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "logit_bias": {0: 90.0}, "repetition_penalty": 2.0})
        )
    ]
    (tmp_path / "tokenizer").mkdir()
    tokenizer_path = str(write_model_folder(tmp_path / "tokenizer"))  # the model has its first 96 tokens
    tokenizer = Tokenizer.from_folder(tmp_path / "tokenizer")
    found = finish(tiny_engine(tmp_path, MODEL, tokenizer_path=tokenizer_path), *bound, *requests())
    with triton_kernels():
        compiled = compiled_engine(tmp_path, num_drafts, run_ahead=1, tokenizer_path=tokenizer_path)
        compiled_found = finish(compiled, *bound, *requests())
    for name, deltas in found.items():
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert [token for delta in compiled_found[name] for token in delta.token_ids] == tokens
        if name.startswith("bound"):
            assert re.fullmatch(r"[a-c]{2,4}-\d{2}", tokenizer.decode(tokens))
