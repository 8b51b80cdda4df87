"""The configuration: frozen, validated once, complete before anything is built from it.

Owns: every setting of the server and of the engine, with its default and its bounds.
Does not know: argv (cli parses), model files (the caller resolves them first).
`EngineConfig` is also the first message that the engine process receives.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minserve.errors import ConfigError, field_fault

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]

BLOCK_SIZE = 16
"""Tokens in a block: the unit of the KV cache. Fixed, because kernels, digests and host layout are built on it."""

MOST_AUTO_DRAFTS = 3
"""Drafts of a step at most, where the engine chooses how many pay."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the engine is built from.

    model_path: a local folder with config.json and safetensors (a hub name has been resolved by then).
    tokenizer_path: the folder with tokenizer.json; None: requests with a grammar are refused.
    token_id_ranges: half-open ranges of the logits' columns that are real tokens; others are never sampled.
        Empty: all of them.
    quantization: "fp8": keep the projections of the layers in 8 bits; None: as the checkpoint has them.
    kv_cache_memory: bytes for KV pages; None: from gpu_memory_utilization, or a quarter of the free memory on a CPU.
    host_kv: bytes of host memory for blocks that have no page; 0: none; "auto": most of what is free at the start. It
        needs prefix caching.
    host_kv_dtype: "fp8": blocks in host memory are in 8 bits: twice as many, and half the bytes of copies; what has
        been there is rounded. "auto": as in pages.
    prefill_reserve: tokens whose pages running requests never take, so that a long prompt can start on a full machine.
    max_num_seqs: requests that run at once. None: 256 on a GPU, 64 on a CPU.
    max_num_batched_tokens: tokens of prompts that one step may compute; decodes come on top.
        None: 2048 beside the decodes on a GPU, 512 on a CPU, where 2048 would hold up all streams for seconds.
    draft_path: a local folder with an EAGLE-3 head; None: no speculation.
    num_draft_tokens: drafts of each step; None: 0, 1 or 3, whichever pays.
    draft_window: tokens that the head sees of a text, beside the first ones; a multiple of 16.
    sparse: who gives up pages for a working set: nobody, the longest when others need them, or everybody with more
        than sparse_above tokens. It needs host_kv.
    working_set_blocks: K, the blocks that a sparse request holds on the device for each KV head of each layer.
    fetch: "fixed": at most fetch_ratio x K blocks a head and step; "adaptive": that on average, saved up for jumps.
    lookahead: whether the draft row behind the verified ones says what to fetch, or the last token's.
        None: the draft, where there is a head.
    verify_drafts: drafts that a sparse request's step accepts at most; None: 0.
    miss_policy: what a step does without the blocks that it wants: takes what is there; runs again where much of its
        attention would be theirs; or has all of them fetched in time, layer by layer.
    enforce_eager: run decode steps as they stand, not from CUDA graphs (a CPU has none).
    run_ahead: steps that are launched before the tokens of the last one are known; None: 1 on a GPU, 0 on a CPU,
        where launching is running.
    """

    model_path: str
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["fp8"] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: PositiveInt | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] | None = None
    max_num_batched_tokens: PositiveInt | None = None
    kv_cache_memory: PositiveInt | None = None
    host_kv: NonNegativeInt | Literal["auto"] = 0
    host_kv_dtype: Literal["auto", "fp8"] = "auto"
    prefill_reserve: NonNegativeInt = 0
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    enable_prefix_caching: bool = True
    rope_scaling: dict[str, Any] | None = None
    tokenizer_path: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    token_id_ranges: tuple[tuple[int, int], ...] = ()
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    run_ahead: Literal[0, 1] | None = None
    enforce_eager: bool = False
    draft_path: str | None = None
    num_draft_tokens: Annotated[int, Meta(ge=1, le=8)] | None = None
    draft_window: Annotated[int, Meta(ge=64, le=2**20, multiple_of=16)] = 2048
    sparse: Literal["never", "pressure", "above"] = "pressure"
    sparse_above: NonNegativeInt = 0
    working_set_blocks: Annotated[int, Meta(ge=1, le=4096)] = 128
    fetch: Literal["fixed", "adaptive"] = "adaptive"
    fetch_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.05
    lookahead: Literal["draft", "current"] | None = None
    verify_drafts: Annotated[int, Meta(ge=0, le=8)] | None = None
    miss_policy: Literal["approximate", "retry", "recall"] = "retry"

    @classmethod
    def checked(cls, **fields: Any) -> "EngineConfig":
        """A configuration of these fields. Raises ConfigError for one that is unknown, out of its bounds, or of no use
        beside the others."""
        try:
            config = msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            name, what = field_fault(error, cls)
            raise ConfigError(f"{name}: {what}") from None
        for wrong, why in _conflicts(config):
            if wrong:
                raise ConfigError(why)
        return config


def _conflicts(config: EngineConfig) -> Iterator[tuple[bool, str]]:
    """What cannot be together, though each of it can: whether it is, and the line that says so."""
    above, caching, headless = config.sparse == "above", config.enable_prefix_caching, config.draft_path is None
    yield (
        above and not caching,
        "--sparse above needs prefix caching, by whose keys blocks are found in host memory; without "
        "--no-enable-prefix-caching it is there, and --sparse never needs none",
    )
    yield (
        bool(config.host_kv) and not caching,
        "--host-kv needs prefix caching: blocks in host memory are found by the keys of the prefix cache; leave "
        "--no-enable-prefix-caching out",
    )
    yield (
        config.host_kv_dtype != "auto" and not config.host_kv,
        f"--host-kv-dtype {config.host_kv_dtype} needs --host-kv, whose blocks it is about; give that a size or auto, "
        "or leave --host-kv-dtype out",
    )
    yield (
        above and not config.host_kv,
        "--sparse above needs --host-kv, which holds what a sparse request has no page for; give it a size or auto, or "
        "choose --sparse pressure or never",
    )
    yield (
        config.sparse_above > 0 and not above,
        f'sparse_above {config.sparse_above} needs sparse to be "above", got {config.sparse!r}',
    )
    yield (
        config.lookahead == "draft" and headless,
        "--lookahead draft needs --draft, whose tokens look ahead; without a head --lookahead current is allowed",
    )
    verified, most = config.verify_drafts or 0, config.num_draft_tokens or MOST_AUTO_DRAFTS
    yield (
        verified > 0 and headless,
        f"--verify-drafts {verified} needs --draft, which proposes them; without a head only 0 is allowed",
    )
    yield (
        verified > most,
        f"--verify-drafts {verified}: a step has at most {most} drafts (--num-draft-tokens); allowed are 0 to {most}",
    )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the API process is built from.

    served_model_names: the names that clients may use; the first is the one that answers carry.
    tool_call_parser: the format of the model's tool calls; None: tools are refused.
    reasoning_parser: how reasoning is marked in answers; "auto": as the template says; "none": it is not set apart.
    max_num_waiting: requests beyond the running ones that may queue; more are refused with 503.
    max_requests_per_key: requests that one API key may have running or waiting; more are refused with 429.
    max_connections: clients that may be connected; one more is told 503 and cut off.
    max_request_bytes: a longer body is refused with 413. None: as the context is long, at least 4 MiB.
    page: whether there is a page for people at /.
    allowed_origins: whose pages browsers may show our answers, "*": anybody's.
    shutdown_timeout_s: how long SIGTERM lets running requests finish.
    """

    model_path: str
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    tool_call_parser: str | None = None
    reasoning_parser: str = "auto"
    max_num_waiting: int = 1024
    max_requests_per_key: int | None = None
    max_connections: int = 4096
    max_request_bytes: int | None = None
    page: bool = True
    allowed_origins: tuple[str, ...] = ()
    shutdown_timeout_s: float = 30.0
