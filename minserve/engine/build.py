"""From a configuration to an engine that is ready to step.

Owns: the order of start-up. Every value is decided before the object that needs it is made.
"""

import secrets
from pathlib import Path

import torch

from minserve.config import EngineConfig
from minserve.engine.core import Engine
from minserve.engine.scheduler import Scheduler
from minserve.engine.sizing import (
    choose_batched_tokens,
    choose_context,
    choose_device,
    choose_dtype,
    kv_cache_bytes,
    num_host_blocks,
)
from minserve.errors import ConfigError
from minserve.memory.blocks import BlockManager, blocks_for
from minserve.memory.copies import SyncCopies
from minserve.memory.host_pool import HostPool
from minserve.memory.lanes import Lanes
from minserve.memory.pages import KVPages
from minserve.models.causal_lm import CausalLM
from minserve.models.config import ModelConfig
from minserve.models.registry import build_model
from minserve.protocol import MAX_MODEL_END_TOKEN_IDS, Ready
from minserve.runner.runner import Runner
from minserve.runner.sampler import Sampler
from minserve.weights.loader import Progress, init_dummy_weights, load_weights


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the model and lay out the memory. progress: told (bytes loaded, bytes in all).

    Raises ConfigError (a WeightsError, where files are at fault) for what the user can mend.
    """
    model_config = ModelConfig.from_folder(Path(config.model_path), config.rope_scaling)
    device = choose_device(config)
    max_num_batched_tokens = choose_batched_tokens(config, device)
    dtype = choose_dtype(config, model_config, device)
    model, weights_bytes = _load(config, model_config, device, dtype, progress)
    kv_bytes = kv_cache_bytes(config, device)
    max_model_len, num_pages = choose_context(config, model_config, dtype, kv_bytes)
    model.set_max_positions(max_model_len)
    pages = KVPages(model_config, num_pages, dtype, device)
    promised_bytes = pages.kv.nbytes if device.type == "cpu" else 0
    host = HostPool(num_host_blocks(config, KVPages.bytes_per_page(model_config, dtype), promised_bytes), pages)
    lanes = Lanes(config.max_num_seqs, blocks_for(max_model_len), model_config.vocab_size, device)
    scheduler = Scheduler(
        BlockManager(
            num_pages,
            secret=secrets.token_bytes(32),
            prefix_caching=config.enable_prefix_caching,
            num_host_blocks=host.kv.shape[0],
            copies=SyncCopies(host.move),
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        end_token_ids=_end_token_ids(config, model_config.vocab_size),
        prefill_reserve=blocks_for(config.prefill_reserve),
    )
    sampler = Sampler(lanes, model_config.vocab_size, config.token_id_ranges)
    run_ahead = config.run_ahead if config.run_ahead is not None else int(device.type == "cuda")
    info = Ready(
        architecture=model_config.architecture,
        device=_device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        num_pages=num_pages,
        num_host_blocks=host.kv.shape[0],
        kv_cache_bytes=pages.kv.nbytes,
        weights_bytes=weights_bytes,
        max_num_seqs=config.max_num_seqs,
    )
    return Engine(scheduler, lanes, Runner(model, pages, lanes, sampler), run_ahead=run_ahead, info=info)


def _end_token_ids(config: EngineConfig, vocab_size: int) -> tuple[int, ...]:
    """The model's end tokens that it can say: some configurations name others."""
    ids = tuple(token_id for token_id in config.eos_token_ids if token_id < vocab_size)
    if len(ids) > MAX_MODEL_END_TOKEN_IDS:
        raise ConfigError(f"the model has {len(ids)} end tokens; at most {MAX_MODEL_END_TOKEN_IDS} are supported")
    return ids


def _load(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress | None
) -> tuple[CausalLM, int]:
    model, fp8 = build_model(model_config), config.quantization == "fp8"
    if config.load_format == "dummy":
        return model, init_dummy_weights(model, device=device, dtype=dtype, fp8=fp8, seed=config.seed)
    folder = Path(config.model_path)
    return model, load_weights(model, folder, device=device, dtype=dtype, fp8=fp8, progress=progress)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
