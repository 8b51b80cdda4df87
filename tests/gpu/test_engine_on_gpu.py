"""The engine on a GPU says what it says on a CPU. Run by hand on such a machine: pytest -m gpu tests/gpu."""

import random

import pytest
import torch

from minserve.engine.plan import StepPlan
from minserve.runner.runner import RunningStep
from tests.engine.tiny import VOCAB, finish, submit, tiny_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAGE = 2 * 2 * 2 * 16 * 8 * 4


def traffic():
    rng = random.Random(5)
    common = [rng.randrange(VOCAB) for _ in range(64)]
    for number in range(24):
        prompt = common[: rng.choice([0, 16, 33, 64])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))]
        sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
        yield submit(str(number), prompt, max_tokens=40, presence_penalty=0.5 * (number % 3), **sampling)


def texts(engine):
    return {
        request_id: [token for delta in deltas for token in delta.token_ids]
        for request_id, deltas in finish(engine, *traffic()).items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"run_ahead": 0},
        {"run_ahead": 1},
        {"run_ahead": 1, "kv_cache_memory": 40 * PAGE, "max_model_len": 256, "host_kv": 60 * PAGE},
        {"run_ahead": 1, "max_num_seqs": 4, "max_num_batched_tokens": 16},
    ],
    ids=["plain", "run-ahead", "few pages and a host tier", "small chunks"],
)
def test_tokens_equal_the_cpus(tmp_path, options):
    on_cpu = tiny_engine(tmp_path)
    on_gpu = tiny_engine(tmp_path, device="cuda", **options)
    # Dummy weights are drawn on their device, and each has its own generator.
    ours, theirs = (dict(engine._runner._model.named_parameters()) for engine in (on_cpu, on_gpu))
    with torch.no_grad():
        for name, parameter in ours.items():
            theirs[name].copy_(parameter)
    assert texts(on_gpu) == texts(on_cpu)
    on_gpu.check()


def test_a_step_gives_its_result_while_the_next_one_is_running():
    tokens = torch.arange(4, device="cuda")
    step = RunningStep(StepPlan(step=1), tokens, [None] * 4, [])
    torch.cuda._sleep(2_000_000_000)  # the next step: about a second
    ended = torch.cuda.current_stream().record_event()
    assert step.result().token_ids == [0, 1, 2, 3]
    assert not ended.query(), "the result came only after the next step"
    torch.cuda.synchronize()
