"""From a configuration to an engine that is ready to step.

Owns: the order of start-up. Every value is decided before the object that needs it is made.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch

from minserve.config import BLOCK_SIZE, EngineConfig
from minserve.engine.core import Engine
from minserve.engine.scheduler import Scheduler
from minserve.engine.sizing import (
    CUDA_DRIVER_BYTES,
    choose_batch,
    choose_context,
    choose_device,
    choose_dtype,
    choose_host_dtype,
    fit_digests,
    kv_cache_bytes,
    num_host_blocks,
    refuse_unsupported,
)
from minserve.engine.sparse_rules import SparseRules
from minserve.errors import ConfigError, RequestError
from minserve.grammar import Grammars, Vocabulary
from minserve.kernels.sparse_rows import RING
from minserve.lookahead.background import Background
from minserve.lookahead.pipeline import Lookahead
from minserve.memory.blocks import BlockManager, blocks_for
from minserve.memory.copies import CopyEngine, StreamCopies, SyncCopies
from minserve.memory.host_pool import AT_ONCE, HostPool
from minserve.memory.lanes import Lanes
from minserve.memory.pages import KVPages
from minserve.memory.streams import CudaStream
from minserve.memory.working_sets import WorkingSets
from minserve.models.causal_lm import CausalLM, build_model
from minserve.models.config import ModelConfig
from minserve.models.eagle3 import Eagle3Head
from minserve.protocol import MAX_DRAFT_TOKENS, MAX_MODEL_END_TOKEN_IDS, Ready
from minserve.runner.attention import KVContext
from minserve.runner.decode import Decode, StepKind
from minserve.runner.graphs import CudaRecorder, DecodeGraphs, graph_sizes
from minserve.runner.prefill import KEY_STEP, FlashShapes
from minserve.runner.runner import Runner
from minserve.runner.sampler import Sampler
from minserve.runner.warmup import compile_tiles, plan_shapes, workspace_bytes
from minserve.spec.draft import Drafter, NoDrafter
from minserve.spec.lengths import AdaptiveLength, DraftLengths, FixedLength
from minserve.text.tokenizer import Tokenizer
from minserve.text.vocabulary import vocabulary_of
from minserve.weights.eagle3 import load_eagle3
from minserve.weights.loader import init_dummy_weights, load_weights

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is: ("weights", bytes, bytes in all)."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """What the engine computes on and with. host_dtype: of host blocks; shapes: those of prefill's attention, where it
    has fixed ones; drafts: how many are proposed."""

    device: torch.device
    dtype: torch.dtype
    host_dtype: torch.dtype
    max_num_seqs: int
    max_num_batched_tokens: int
    shapes: FlashShapes | None
    drafts: DraftLengths


def build_engine(config: EngineConfig, progress: Progress = lambda *_: None) -> Engine:
    """Load the model and lay out the memory.

    Raises ConfigError (a WeightsError, where files are at fault) for what the user can mend.
    """
    try:
        return _build(config, progress)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(f"the GPU's memory is too small for this model and these settings: {error}") from error


def _build(config: EngineConfig, progress: Progress) -> Engine:
    model_config = ModelConfig.from_folder(Path(config.model_path), config.rope_scaling)
    machine = _choose_machine(config, model_config)
    device, dtype = machine.device, machine.dtype
    model, weights_bytes = _load(config, model_config, device, dtype, progress)
    model.set_max_positions(config.max_model_len or model_config.max_position_embeddings)
    head = _load_head(config, model, machine)
    new_drafter = partial(_drafter, head, config.draft_window)
    kv_bytes = kv_cache_bytes(config, device, _workspace_bytes(model, machine, new_drafter))
    fit = partial(choose_context, config, model_config, dtype, machine.max_num_seqs)
    if device.type == "cuda":
        num_blocks, sets_bytes = _on_gpu_for_host_blocks(config, machine, model_config, kv_bytes)
        max_model_len, num_pages = fit(kv_bytes - sets_bytes)
    else:
        max_model_len, num_pages = fit(kv_bytes)
        promised_bytes = num_pages * KVPages.bytes_per_page(model_config, dtype)
        num_blocks = num_host_blocks(config, KVPages.bytes_per_page(model_config, machine.host_dtype), promised_bytes)
    pages = KVPages(model_config, num_pages, dtype, device)
    host = HostPool(num_blocks, pages, machine.host_dtype, partial(progress, "host memory, GiB"))
    has_sets = _has_working_sets(config, num_blocks)
    max_blocks = max(blocks_for(max_model_len), config.working_set_blocks + RING if has_sets else 0)
    lanes = Lanes(machine.max_num_seqs, max_blocks, model_config.vocab_size, device)
    sets = WorkingSets(pages, host, lanes, model_config.num_heads, config.working_set_blocks) if has_sets else None
    grammars = Grammars(partial(_vocabulary, config, model_config.vocab_size))
    sparse = _sparse_rules(config, host, has_head=head is not None) if has_sets else None
    scheduler = Scheduler(
        BlockManager(
            num_pages,
            secret=secrets.token_bytes(32),
            prefix_caching=config.enable_prefix_caching,
            num_host_blocks=host.kv.shape[0],
            copies=_copies(host, device),
        ),
        max_num_seqs=machine.max_num_seqs,
        max_num_batched_tokens=machine.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        end_token_ids=_end_token_ids(config, model_config.vocab_size),
        prefill_reserve=blocks_for(config.prefill_reserve),
        chunk_step=KEY_STEP if machine.shapes is not None else 1,
        drafts=machine.drafts,
        grammars=grammars,
        sparse=sparse,
    )
    runner = _runner(config, machine, model, pages, lanes, sets, new_drafter(lanes), progress)
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
        max_num_seqs=machine.max_num_seqs,
        draft="" if head is None else head.describe(),
        num_working_set_blocks=sparse.num_slots if sparse is not None else 0,
        link_bytes_s=sparse.link_bytes_s or 0.0 if sparse is not None else 0.0,
    )
    run_ahead = config.run_ahead if config.run_ahead is not None else int(device.type == "cuda")
    return Engine(scheduler, lanes, runner, grammars, run_ahead=run_ahead, info=info, sets=sets, release=host.close)


def _copies(host: HostPool, device: torch.device) -> CopyEngine:
    return StreamCopies(host.move_all, CudaStream(device)) if device.type == "cuda" else SyncCopies(host.move)


def _has_working_sets(config: EngineConfig, num_host_blocks: int) -> bool:
    """Whether requests may be sparse. That needs host blocks for all that has no page."""
    return num_host_blocks > 0 and config.sparse != "never"


def _on_gpu_for_host_blocks(
    config: EngineConfig, machine: _Machine, model: ModelConfig, kv_bytes: int
) -> tuple[int, int]:
    """(host blocks, the GPU's bytes for their scales and the working sets that they allow, which come out of
    kv_bytes)."""
    num_blocks = num_host_blocks(config, KVPages.bytes_per_page(model, machine.host_dtype), 0)
    if num_blocks == 0:
        return 0, 0
    has_sets, num_slots = _has_working_sets(config, num_blocks), config.working_set_blocks
    max_blocks = max(blocks_for(config.max_model_len or model.max_position_embeddings), num_slots + RING)
    scale_bytes = HostPool.device_bytes_per_block(model, machine.host_dtype)

    def bytes_for(number: int) -> int:
        if not has_sets:
            return number * scale_bytes
        entries = graph_sizes(machine.max_num_seqs)[-1]
        recalls = config.miss_policy == "recall"
        passes = Background.bytes_for(model, num_slots, max_blocks, entries, recalls=recalls)
        passes += 4 * AT_ONCE * KVPages.bytes_per_page(model, machine.dtype)
        sets_bytes = WorkingSets.bytes_for(
            model,
            machine.dtype,
            machine.device,
            num_lanes=machine.max_num_seqs,
            max_blocks=max_blocks,
            num_slots=num_slots,
            num_host_blocks=number,
        )
        return number * scale_bytes + passes + sets_bytes

    num_blocks = fit_digests(config, num_blocks, kv_bytes, bytes_for)
    return num_blocks, bytes_for(num_blocks)


def _sparse_rules(config: EngineConfig, host: HostPool, *, has_head: bool) -> SparseRules:
    return SparseRules.of(
        mode=config.sparse,
        above=config.sparse_above,
        num_slots=config.working_set_blocks,
        fetch=config.fetch,
        fetch_ratio=config.fetch_ratio,
        lookahead=config.lookahead,
        num_verified=config.verify_drafts,
        miss_policy=config.miss_policy,
        has_head=has_head,
        num_layers=host.kv.shape[1],
        num_kv_heads=host.kv.shape[2],
        head_block_bytes=host.kv[0, 0, 0].nbytes,
        link_bytes_s=host.measure_link(),
    )


def _choose_machine(config: EngineConfig, model_config: ModelConfig) -> _Machine:
    device = choose_device(config)
    refuse_unsupported(model_config, device)
    dtype = choose_dtype(config, model_config, device)
    drafts = _choose_drafts(config)
    max_num_seqs, max_num_batched_tokens = choose_batch(config, device)
    fixed = device.type == "cuda" and dtype != torch.float32  # cuDNN has no attention in float32
    shapes = FlashShapes.for_chunks_of(max_num_batched_tokens) if fixed else None
    host_dtype = choose_host_dtype(config, dtype, device)
    return _Machine(device, dtype, host_dtype, max_num_seqs, max_num_batched_tokens, shapes, drafts)


def _choose_drafts(config: EngineConfig) -> DraftLengths:
    if config.draft_path is None:
        if config.num_draft_tokens is not None:
            raise ConfigError("--num-draft-tokens needs --draft, which proposes them")
        return FixedLength(0)
    return AdaptiveLength() if config.num_draft_tokens is None else FixedLength(config.num_draft_tokens)


def _load_head(config: EngineConfig, model: CausalLM, machine: _Machine) -> Eagle3Head | None:
    if config.draft_path is None:
        return None
    head = load_eagle3(Path(config.draft_path), model.config, device=machine.device, dtype=machine.dtype)
    head.share_with(model)
    # Chains of drafts go beyond the text's end, and so do launched steps that turn out to be too many.
    head.set_max_positions(model.rope_table.shape[0] + 4 * MAX_DRAFT_TOKENS)
    return head


def _drafter(head: Eagle3Head | None, window: int, lanes: Lanes) -> Drafter | NoDrafter:
    if head is None:
        return NoDrafter()
    sizes = (window, head.config.window or window, head.rope_table.shape[0])
    return Drafter(head, lanes, max(64, min(sizes) // BLOCK_SIZE * BLOCK_SIZE))


def _workspace_bytes(model: CausalLM, machine: _Machine, new_drafter: Callable[[Lanes], Drafter | NoDrafter]) -> int:
    """What steps need beside weights and KV; on a CPU nobody counts it."""
    if machine.device.type == "cpu":
        return 0
    num_bytes = workspace_bytes(
        model,
        new_drafter,
        torch.empty(0, dtype=machine.dtype, device=machine.device),
        num_tokens=machine.max_num_batched_tokens,
        num_lanes=graph_sizes(machine.max_num_seqs)[-1],
        num_drafts=machine.drafts.most,
        shapes=machine.shapes,
    )
    torch.cuda.empty_cache()
    return CUDA_DRIVER_BYTES + num_bytes


def _runner(
    config: EngineConfig,
    machine: _Machine,
    model: CausalLM,
    pages: KVPages,
    lanes: Lanes,
    sets: WorkingSets | None,
    drafter: Drafter | NoDrafter,
    progress: Progress,
) -> Runner:
    """The runner, warm: what takes its time once has been done."""
    vocab_size = model.config.vocab_size
    sampler = Sampler(lanes, vocab_size, config.token_id_ranges)
    context = KVContext(pages.kv, lanes.page_table, model.rope_table, model.config.rms_norm_eps, model.config.num_heads)
    lookahead = None
    if sets is not None:
        most_entries = graph_sizes(machine.max_num_seqs)[-1]
        lookahead = Lookahead(sets, recalls=config.miss_policy == "recall", max_entries=most_entries)
    decode = Decode(model, context, lanes, sampler, drafter, lookahead)
    if machine.shapes is not None:
        max_keys = lanes.page_table.shape[1] * BLOCK_SIZE
        compile_tiles(context)
        plan_shapes(machine.shapes, model, machine.dtype, max_keys, partial(progress, "attention plans"))
    if machine.device.type == "cpu" or config.enforce_eager:
        return Runner(model, context, sampler, decode, decode, drafter, machine.shapes)
    graphs = DecodeGraphs(
        decode,
        CudaRecorder(),
        CudaRecorder(),
        max_lanes=machine.max_num_seqs,
        most_drafts=machine.drafts.most,
        vocab_size=vocab_size,
        dtype=machine.dtype,
        device=machine.device,
    )
    usual = machine.drafts.usual
    kinds = [StepKind(*kind) for kind in product(usual, usual, (False, True))]
    if lookahead is not None:
        kinds += [StepKind(num, num, keeps_queries=True) for num in usual]
    graphs.capture(kinds, partial(progress, "CUDA graphs"))
    return Runner(model, context, sampler, decode, graphs, drafter, machine.shapes)


def _end_token_ids(config: EngineConfig, vocab_size: int) -> tuple[int, ...]:
    """The model's end tokens that it can say: some configurations name others."""
    ids = tuple(token_id for token_id in config.eos_token_ids if token_id < vocab_size)
    if len(ids) > MAX_MODEL_END_TOKEN_IDS:
        raise ConfigError(f"the model has {len(ids)} end tokens; at most {MAX_MODEL_END_TOKEN_IDS} are supported")
    return ids


def _vocabulary(config: EngineConfig, vocab_size: int) -> Vocabulary:
    """What grammars are held against. Read when the first one comes: most servers never see any."""
    if config.tokenizer_path is None:
        raise RequestError("this engine was given no tokenizer, so it knows no grammars", param="grammar")
    tokenizer = Tokenizer.from_folder(Path(config.tokenizer_path))
    return vocabulary_of(tokenizer, vocab_size, _end_token_ids(config, vocab_size))


def _load(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress
) -> tuple[CausalLM, int]:
    model, fp8 = build_model(model_config), config.quantization == "fp8"
    if config.load_format == "dummy":
        return model, init_dummy_weights(model, device=device, dtype=dtype, fp8=fp8, seed=config.seed)
    folder = Path(config.model_path)
    return model, load_weights(
        model, folder, device=device, dtype=dtype, fp8=fp8, progress=partial(progress, "weights")
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
