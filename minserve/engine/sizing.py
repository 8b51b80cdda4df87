"""How large the engine may be: device, dtype, context and number of pages, decided once at start.

Owns: the arithmetic and its refusals. Does not know: models' modules or requests.
"""

from collections.abc import Callable

import torch

from minserve.config import BLOCK_SIZE, EngineConfig
from minserve.engine.host_memory import available_bytes, lines_of
from minserve.errors import ConfigError
from minserve.kernels.fp8 import CAPABILITY, FP8
from minserve.memory.blocks import blocks_for
from minserve.memory.pages import KVPages
from minserve.models.config import ModelConfig

GIB = 2**30
SMALLEST_CONTEXT = 256
"""A context that is cut to what the pages hold is not cut below this: nobody means that."""

CPU_SHARE_OF_FREE_MEMORY = 0.25
AUTO_SHARE_OF_HOST_MEMORY = 0.8
"""Of what is free when the engine starts, `--host-kv auto` leaves a fifth to everything that comes later."""

DIGESTS_SHARE_OF_KV_MEMORY = 0.5
"""Of the GPU's memory for KV, what working sets and the scales of host blocks may take beside pages."""

CUDA_HEAD_DIMS = (64, 128)
CUDA_DRIVER_BYTES = GIB // 2
"""What CUDA itself takes later on, beside torch's allocations: code of kernels, graphs, cuDNN's plans."""


def choose_device(config: EngineConfig) -> torch.device:
    """The configured device, or CUDA if there is one."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The configured dtype; else on a GPU the checkpoint's (bfloat16 for a float32 one), on a CPU bfloat16 if the CPU
    computes in it and the checkpoint is no float32 one, which may say something else in 16 bits."""
    if config.dtype != "auto":
        return _torch_dtype(config.dtype)
    if device.type == "cuda":
        return torch.bfloat16 if model.dtype == "float32" else _torch_dtype(model.dtype)
    return torch.bfloat16 if model.dtype != "float32" and cpu_has_bfloat16() else torch.float32


def choose_host_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """That of host blocks: the pages' or, if it is so configured, FP8."""
    if config.host_kv_dtype == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        raise ConfigError(
            f"--host-kv-dtype fp8 needs a GPU of compute capability {needed} or newer (Ada, Hopper); on this one only "
            "auto is allowed"
        )
    return FP8


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def choose_batch(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens): as configured, or as much as such a device computes in a moment."""
    num_seqs, num_tokens = (64, 512) if device.type == "cpu" else (256, 2048)
    return config.max_num_seqs or num_seqs, config.max_num_batched_tokens or num_tokens


def refuse_unsupported(model: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError for a model that the kernels of this device do not compute."""
    if device.type == "cuda" and model.head_dim not in CUDA_HEAD_DIMS:
        raise ConfigError(
            f"this model's heads have {model.head_dim} dimensions; supported on CUDA are "
            f"{' and '.join(map(str, CUDA_HEAD_DIMS))}"
        )


def choose_context(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, max_num_seqs: int, kv_bytes: int
) -> tuple[int, int]:
    """(max_model_len, num_pages): pages enough for one request of max_model_len tokens beside the prefill reserve, and
    as many as kv_bytes hold or max_num_seqs such requests need."""
    page_bytes = KVPages.bytes_per_page(model, dtype)
    longest = model.max_position_embeddings
    wanted = config.max_model_len or longest
    if wanted > longest:
        raise ConfigError(f"--max-model-len {wanted}: this model's positions end at {longest}")
    num_reserved = blocks_for(config.prefill_reserve)
    num_pages = min(kv_bytes // page_bytes, max_num_seqs * blocks_for(wanted) + num_reserved)
    fits = (num_pages - num_reserved) * BLOCK_SIZE
    if wanted > fits and (config.max_model_len is not None or fits < SMALLEST_CONTEXT):
        reserve = f" beside a prefill reserve of {config.prefill_reserve} tokens" if num_reserved else ""
        raise ConfigError(
            f"a context of {wanted} tokens{reserve} needs {(blocks_for(wanted) + num_reserved) * page_bytes / GIB:.2f} "
            f"GiB of KV cache and {kv_bytes / GIB:.2f} GiB are there; lower --max-model-len to {max(0, fits)} or raise "
            "--kv-cache-memory"
        )
    return min(wanted, fits), num_pages


def kv_cache_bytes(config: EngineConfig, device: torch.device, workspace_bytes: int) -> int:
    """Bytes for KV pages, after the weights have been loaded. workspace_bytes: what else the device must hold."""
    if device.type == "cpu":
        free = total = available_bytes()
    else:
        free, total = torch.cuda.mem_get_info(device)
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory + workspace_bytes > free:
            raise ConfigError(
                f"--kv-cache-memory {config.kv_cache_memory / GIB:.2f} GiB: only {free / GIB:.2f} GiB are free, and "
                f"{workspace_bytes / GIB:.2f} GiB of them are needed to compute"
            )
        return config.kv_cache_memory
    if device.type == "cpu":
        return int(free * CPU_SHARE_OF_FREE_MEMORY)
    used = total - free
    left = int(total * config.gpu_memory_utilization) - used - workspace_bytes
    if left <= 0:
        raise ConfigError(
            f"no memory is left for KV cache: of {total / GIB:.2f} GiB --gpu-memory-utilization "
            f"{config.gpu_memory_utilization} allows {total * config.gpu_memory_utilization / GIB:.2f}, "
            f"{used / GIB:.2f} are taken (weights, other programs), {workspace_bytes / GIB:.2f} are needed to compute"
        )
    return left


def num_host_blocks(config: EngineConfig, block_bytes: int, promised_bytes: int) -> int:
    """Host blocks of block_bytes in host_kv bytes. Raises ConfigError if there is less, or nothing for "auto".

    promised_bytes: host memory that has been promised but is taken only when it is written: a CPU's own pages.
    """
    free = available_bytes()
    if config.host_kv == "auto":
        num_blocks = int(free * AUTO_SHARE_OF_HOST_MEMORY - promised_bytes) // block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"--host-kv auto: of {free / GIB:.2f} GiB of host memory that are available here, "
                f"{promised_bytes / GIB:.2f} are for the KV cache, and a fifth stays free: nothing is left; lower "
                "--kv-cache-memory, or give the container more"
            )
        return num_blocks
    available = max(0, free - promised_bytes)
    if config.host_kv > available:
        raise ConfigError(
            f"--host-kv {config.host_kv / GIB:.2f} GiB: only {available / GIB:.2f} GiB of host memory are available "
            "here; lower it, or give the container more"
        )
    return config.host_kv // block_bytes


def fit_digests(config: EngineConfig, num_host_blocks: int, kv_bytes: int, bytes_for: Callable[[int], int]) -> int:
    """As many of so many host blocks as the GPU has room for, whose digests, scales and other tables come out of
    kv_bytes. bytes_for: of those of so many host blocks. Raises ConfigError if fewer would do than were asked for."""
    most = int(DIGESTS_SHARE_OF_KV_MEMORY * kv_bytes)
    least, needed = bytes_for(0), bytes_for(num_host_blocks)
    if needed <= most:
        return num_host_blocks
    fitting = int((most - least) // ((needed - least) / num_host_blocks)) if most > least else 0
    if config.host_kv == "auto" and fitting > 0:
        return fitting
    slots, tables = f" and {config.working_set_blocks} slots (--working-set-blocks)", "digests and tables"
    rest = ", or --max-num-seqs, or --max-model-len; or say --sparse never"
    if config.sparse == "never":
        slots, tables, rest = "", "the scales of 8-bit blocks", ", or say --host-kv-dtype auto"
    raise ConfigError(
        f"{num_host_blocks} host blocks (--host-kv){slots} need {needed / GIB:.2f} GiB of the GPU's memory for "
        f"{tables}, and at most half of the {kv_bytes / GIB:.2f} GiB for KV cache may be that: lower --host-kv to "
        f"{fitting / num_host_blocks:.0%} of it{rest}"
    )


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies in bfloat16, rather than by way of float32."""
    flags = {
        flag for line in lines_of("/proc/cpuinfo") if line.startswith(("flags", "Features")) for flag in line.split()
    }
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
