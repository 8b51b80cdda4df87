"""The engine on a GPU says what it says on a CPU. Run by hand on such a machine: pytest -m gpu tests/gpu."""

import random

import pytest
import torch

from minserve.runner.graphs import DecodeGraphs
from minserve.runner.runner import Part, RunningStep
from tests.engine.tiny import CONFIG, VOCAB, finish, submit, take_weights, tiny_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "head_dim": 64}
PAGE = 2 * 2 * 2 * 16 * 64 * 4
"""Bytes: 2 layers, 2 KV heads, K and V, 16 tokens, 64 dimensions, float32."""


def traffic():
    rng = random.Random(5)
    common = [rng.randrange(VOCAB) for _ in range(64)]
    for number in range(24):
        prompt = common[: rng.choice([0, 16, 33, 64])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
        options = {"presence_penalty": 0.5 * (number % 3), "logprobs": 2 if number % 5 == 0 else None}
        if number % 7 == 0:
            options |= {"logit_bias": {number % VOCAB: -50.0}, "prompt_logprobs": 1}
        yield submit(str(number), prompt, max_tokens=40, **options, **sampling)


def answers(engine):
    """(tokens, log probabilities) of each request."""
    found = {}
    for request_id, deltas in finish(engine, *traffic()).items():
        tokens = [token for delta in deltas for token in delta.token_ids]
        reports = [entry for delta in deltas for entry in [*(delta.prompt_logprobs or ()), *(delta.logprobs or ())]]
        found[request_id] = tokens, [entry.logprob for entry in reports if entry is not None]
    return found


def assert_same(ours, theirs):
    for request_id, (tokens, logprobs) in theirs.items():
        assert ours[request_id][0] == tokens
        assert ours[request_id][1] == pytest.approx(logprobs, abs=1e-3)


def engine_like(other, folder, **options):
    """An engine on the GPU with the weights of another."""
    engine = tiny_engine(folder, MODEL, device="cuda", **options)
    take_weights(engine, other)
    return engine


@pytest.mark.parametrize(
    "options",
    [
        {"run_ahead": 0, "enforce_eager": True},
        {"run_ahead": 0},
        {"run_ahead": 1},
        {"run_ahead": 1, "kv_cache_memory": 40 * PAGE, "max_model_len": 256, "host_kv": 60 * PAGE, "sparse": "never"},
        {"run_ahead": 1, "max_num_seqs": 5, "max_num_batched_tokens": 16},
    ],
    ids=["eager", "graphs", "run-ahead", "few pages and a host tier", "small chunks"],
)
def test_answers_equal_the_cpus(tmp_path, options):
    on_cpu = tiny_engine(tmp_path, MODEL)
    on_gpu = engine_like(on_cpu, tmp_path, **options)
    assert isinstance(on_gpu._runner._decode, DecodeGraphs) == ("enforce_eager" not in options)
    assert_same(answers(on_gpu), answers(on_cpu))
    on_gpu.check()


def test_in_bfloat16_graphs_and_run_ahead_change_no_bit(tmp_path):
    """The same kernels on the same rows: there is no noise to forgive, as long as batches are the same."""
    plain = tiny_engine(tmp_path, MODEL, device="cuda", dtype="bfloat16", run_ahead=0, enforce_eager=True)
    graphs = engine_like(plain, tmp_path, dtype="bfloat16", run_ahead=0)
    ahead = engine_like(plain, tmp_path, dtype="bfloat16", run_ahead=1)
    one_by_one = [request for request in traffic() if request.params.prompt_logprobs is None]
    for request in one_by_one:
        texts = [
            [token for delta in finish(engine, request)[request.request_id] for token in delta.token_ids]
            for engine in (plain, graphs, ahead)
        ]
        assert texts[0] == texts[1] == texts[2]


def test_a_step_gives_its_result_while_the_next_one_is_running():
    device = torch.device("cuda")
    step = RunningStep(1)
    tokens = torch.empty(4, dtype=torch.int64, pin_memory=True)
    tokens.copy_(torch.arange(4, device=device), non_blocking=True)
    counts = torch.ones(4, dtype=torch.int64)
    step.parts.append(Part(tokens[:, None], counts, [], []))
    step.launched(device)
    torch.cuda._sleep(2_000_000_000)  # the next step: about a second
    ended = torch.cuda.current_stream().record_event()
    assert step.result().token_ids == [[0], [1], [2], [3]]
    assert not ended.query(), "the result came only after the next step"
    torch.cuda.synchronize()
