"""Memory for KV and the context that fits into it: what is there, and what is refused."""

import pytest
import torch
from msgspec.structs import replace

from minserve.config import EngineConfig
from minserve.engine import sizing
from minserve.errors import ConfigError
from minserve.kernels.fp8 import FP8
from minserve.models.config import ModelConfig, RopeConfig

MIB = 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """600 MiB of host memory are available."""
    monkeypatch.setattr(sizing, "available_bytes", lambda: 600 * MIB)


def blocks(mib, promised_mib=0):
    config = EngineConfig(model_path="x", host_kv=mib if mib == "auto" else mib * MIB)
    return sizing.num_host_blocks(config, block_bytes=2 * MIB, promised_bytes=promised_mib * MIB)


def test_host_blocks_are_as_many_as_fit_into_what_is_asked_for():
    assert blocks(0) == 0
    assert blocks(401) == 200
    assert blocks(600) == 300


def test_more_than_is_available_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"0\.60 GiB: only 0\.59 GiB"):
        blocks(610)


def test_what_the_cpus_own_pages_were_promised_is_not_promised_again():
    assert blocks(400, promised_mib=200) == 200
    with pytest.raises(ConfigError, match="host-kv"):
        blocks(402, promised_mib=200)


def test_auto_is_four_fifths_of_what_is_available_less_the_cpus_own_pages():
    assert blocks("auto") == 480 / 2
    assert blocks("auto", promised_mib=200) == 280 / 2


def test_auto_is_never_nothing_without_a_word():
    assert blocks("auto", promised_mib=478) == 1
    with pytest.raises(ConfigError, match=r"--host-kv auto: of 0\.59 GiB .* 0\.47 are for the KV cache"):
        blocks("auto", promised_mib=480)


def kv_bytes(mib, device="cpu", workspace_mib=0, **options):
    config = EngineConfig(model_path="x", kv_cache_memory=None if mib is None else mib * MIB, **options)
    return sizing.kv_cache_bytes(config, torch.device(device), workspace_mib * MIB) / MIB


def test_a_cpus_kv_cache_is_a_quarter_of_what_is_free_or_what_is_asked_for():
    assert kv_bytes(None) == 150
    assert kv_bytes(600) == 600


def test_a_kv_cache_larger_than_the_memory_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"--kv-cache-memory 0\.98 GiB: only 0\.59 GiB"):
        kv_bytes(1000)


def fitting(num_blocks, kv_mib, mib="auto", **options):
    """Of so many host blocks, of which each takes a MiB of the GPU's beside 10 for all."""
    config = EngineConfig(model_path="x", host_kv=mib, **options)
    return sizing.fit_digests(config, num_blocks, kv_mib * MIB, lambda number: (10 + number) * MIB)


def test_host_blocks_are_no_more_than_half_of_the_gpus_kv_memory_has_tables_for():
    assert fitting(90, 200) == 90
    assert fitting(91, 200) == 90
    assert fitting(90, 200, mib=90 * MIB) == 90


def test_host_blocks_that_were_asked_for_are_never_fewer():
    with pytest.raises(ConfigError, match=r"180 host blocks .* 128 slots .* lower --host-kv to 50% .* --sparse never"):
        fitting(180, 200, mib=180 * MIB)
    with pytest.raises(ConfigError, match=r"180 host blocks \(--host-kv\) need .* scales .* say --host-kv-dtype auto"):
        fitting(180, 200, mib=180 * MIB, sparse="never", host_kv_dtype="fp8")


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_host_blocks_in_8_bits_want_a_gpu_that_converts_them(monkeypatch, capability, is_refused):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    plain, fp8 = (EngineConfig(model_path="x", host_kv_dtype=name) for name in ("auto", "fp8"))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert sizing.choose_host_dtype(plain, torch.bfloat16, cuda) == torch.bfloat16
    assert sizing.choose_host_dtype(fp8, torch.float32, cpu) == FP8
    if is_refused:
        with pytest.raises(ConfigError, match=r"--host-kv-dtype fp8 needs .* 8\.9 .* only auto is allowed"):
            sizing.choose_host_dtype(fp8, torch.bfloat16, cuda)
    else:
        assert sizing.choose_host_dtype(fp8, torch.bfloat16, cuda) == FP8


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 10000 MiB, of which weights and other programs have taken 4000."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6000 * MIB, 10_000 * MIB))


def test_a_gpus_kv_cache_is_what_its_share_leaves_beside_what_is_taken_and_what_steps_need(gpu):
    assert kv_bytes(None, "cuda", workspace_mib=1000, gpu_memory_utilization=0.75) == 7500 - 4000 - 1000
    assert kv_bytes(5000, "cuda", workspace_mib=1000, gpu_memory_utilization=0.1) == 5000


def test_a_gpu_without_room_for_kv_is_refused_with_all_numbers(gpu):
    with pytest.raises(ConfigError, match=r"of 9\.77 GiB .* 0\.4 allows 3\.91, 3\.91 are taken .* 0\.98 are needed"):
        kv_bytes(None, "cuda", workspace_mib=1000, gpu_memory_utilization=0.4)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory 4\.98 GiB: only 5\.86 GiB are free, and 0\.98 GiB"):
        kv_bytes(5100, "cuda", workspace_mib=1000)


@pytest.mark.parametrize(
    ("device", "options", "batch"),
    [
        ("cpu", {}, (64, 512)),
        ("cuda", {}, (256, 2048)),
        ("cuda", {"max_num_seqs": 3000}, (3000, 2048)),
        ("cuda", {"max_num_batched_tokens": 100}, (256, 100)),
        ("cpu", {"max_num_seqs": 7, "max_num_batched_tokens": 9}, (7, 9)),
    ],
)
def test_a_batch_is_what_is_asked_for_or_what_such_a_device_computes_in_a_moment(device, options, batch):
    assert sizing.choose_batch(EngineConfig(model_path="x", **options), torch.device(device)) == batch


TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rope=RopeConfig(),
    dtype="float32",
)
PAGE_BYTES = 2 * 16 * 8 * 4


def context(num_pages, **options):
    config = EngineConfig(model_path="x", **options)
    return sizing.choose_context(config, TINY, torch.float32, 64, num_pages * PAGE_BYTES)


def test_a_context_that_was_not_asked_for_is_cut_to_what_the_pages_hold():
    assert context(1000) == (4096, 1000)
    assert context(16) == (256, 16)


def test_a_context_is_not_cut_to_almost_nothing():
    with pytest.raises(ConfigError, match="lower --max-model-len to 240"):
        context(15)


def test_a_context_that_was_asked_for_is_never_cut():
    assert context(15, max_model_len=240) == (240, 15)
    with pytest.raises(ConfigError, match="lower --max-model-len to 240"):
        context(15, max_model_len=256)


def test_the_prefill_reserve_is_beside_the_context():
    assert context(20, max_model_len=256, prefill_reserve=64) == (256, 20)
    with pytest.raises(ConfigError, match="beside a prefill reserve of 65 tokens"):
        context(20, max_model_len=256, prefill_reserve=65)


def test_a_context_longer_than_the_models_positions_is_refused():
    with pytest.raises(ConfigError, match="positions end at 4096"):
        context(1000, max_model_len=4097)


def test_a_model_that_the_gpus_kernels_do_not_compute_is_refused_on_a_gpu_only():
    sizing.refuse_unsupported(TINY, torch.device("cpu"))
    sizing.refuse_unsupported(replace(TINY, head_dim=128), torch.device("cuda"))
    with pytest.raises(ConfigError, match="8 dimensions; supported on CUDA are 64 and 128"):
        sizing.refuse_unsupported(TINY, torch.device("cuda"))


@pytest.mark.parametrize(
    ("device", "checkpoint", "has_bfloat16", "expected"),
    [
        ("cuda", "float32", False, torch.bfloat16),
        ("cuda", "float16", False, torch.float16),
        ("cpu", "bfloat16", True, torch.bfloat16),
        ("cpu", "bfloat16", False, torch.float32),
        ("cpu", "float32", True, torch.float32),
        ("cpu", "float16", True, torch.bfloat16),
    ],
)
def test_a_dtype_that_nobody_chose_is_what_the_device_is_good_at(
    monkeypatch, device, checkpoint, has_bfloat16, expected
):
    """On a CPU a float32 checkpoint stays what it is: it says something else in 16 bits, for no speed."""
    monkeypatch.setattr(sizing, "cpu_has_bfloat16", lambda: has_bfloat16)
    config, model = EngineConfig(model_path="x"), replace(TINY, dtype=checkpoint)
    assert sizing.choose_dtype(config, model, torch.device(device)) == expected
    chosen = replace(config, dtype="float16")
    assert sizing.choose_dtype(chosen, model, torch.device(device)) == torch.float16
