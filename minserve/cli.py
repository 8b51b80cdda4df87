"""The `minserve` command: argv to a configuration, and from there to a server.

Owns: the order in which things are found wrong, and the exit codes. Does not know: how flags are spelled, HTTP, torch.

Exit codes: 0 stopped, 1 the engine died, 2 the configuration cannot be served, 130 interrupted while starting.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from minserve.config import EngineConfig, ServerConfig
from minserve.errors import ConfigError
from minserve.flag_values import api_key
from minserve.flags import parse_args
from minserve.logs import set_up_logs

EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    args = parse_args(argv)
    set_up_logs(args.log_level, args.log_format)
    try:
        return _serve(args)
    except ConfigError as error:
        print(f"minserve: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        print("minserve: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _serve(args: argparse.Namespace) -> int:
    # Imported late, so that --help and a wrong flag answer at once.
    import uvloop

    from minserve.api.launch import launch
    from minserve.api.server import bind
    from minserve.engine.client import EngineClient
    from minserve.text.chat import ChatTemplate
    from minserve.text.reasoning import reasoning_format
    from minserve.text.tokenizer import Tokenizer
    from minserve.text.toolcalls import tool_parser_class
    from minserve.weights.default_model import find_draft

    # What can be wrong is found before anything that takes long.
    if args.tool_call_parser is not None:
        tool_parser_class(args.tool_call_parser)
    reasoning_format(args.reasoning_parser, template_closes_tag=False)
    with bind(args.host, args.port) as sock:
        name, model_folder, tokenizer_folder = _find_model(args)
        tokenizer = Tokenizer.from_folder(tokenizer_folder, model_folder=model_folder)
        template = ChatTemplate.from_folder(tokenizer_folder, args.chat_template)
        server_config = server_config_of(args, name, model_folder)
        engine_config = engine_config_of(
            args,
            model_folder,
            eos_token_ids=tokenizer.eos_token_ids,
            token_id_ranges=tokenizer.token_id_ranges,
            tokenizer_folder=tokenizer_folder,
            draft_folder=find_draft(args.draft, args.model),
        )
        start_engine = partial(EngineClient.start, engine_timeout_s=args.engine_timeout)
        return uvloop.run(launch(server_config, engine_config, tokenizer, template, start_engine, sock))


def _find_model(args: argparse.Namespace) -> tuple[str, Path, Path]:
    """What the user calls the model, its folder and its tokenizer's; downloads what is not there."""
    from minserve.weights.default_model import DEFAULT_MODEL_NAME, ensure_default_model
    from minserve.weights.hub import resolve_model, resolve_tokenizer

    if args.model is None:
        name, model_folder = DEFAULT_MODEL_NAME, ensure_default_model()
    else:
        name = args.model
        model_folder = resolve_model(name, revision=args.revision, need_weights=args.load_format != "dummy")
    return name, model_folder, resolve_tokenizer(args.tokenizer) if args.tokenizer else model_folder


def server_config_of(args: argparse.Namespace, name: str, model_folder: Path) -> ServerConfig:
    """What the API process is built from. name: what the user called the model."""
    api_keys = tuple(args.api_key) or _keys_of_environment()
    if args.max_requests_per_key is not None and not api_keys:
        raise ConfigError("--max-requests-per-key needs --api-key: without keys, clients cannot be told apart")
    return ServerConfig(
        model_path=str(model_folder),
        served_model_names=tuple(args.served_model_name or [name]),
        api_keys=api_keys,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        max_num_waiting=args.max_num_waiting,
        max_requests_per_key=args.max_requests_per_key,
        max_connections=args.max_connections,
        max_request_bytes=args.max_request_bytes,
        page=args.page,
        allowed_origins=tuple(chain.from_iterable(args.allowed_origins)),
        shutdown_timeout_s=args.shutdown_timeout,
    )


def _keys_of_environment() -> tuple[str, ...]:
    """The key in MINSERVE_API_KEY, if it is set to any. Raises ConfigError for one that clients could never send."""
    key = os.environ.get("MINSERVE_API_KEY", "")
    try:
        return (api_key(key),) if key else ()
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"MINSERVE_API_KEY {error}") from None


def engine_config_of(
    args: argparse.Namespace,
    model_folder: Path,
    *,
    eos_token_ids: tuple[int, ...],
    token_id_ranges: tuple[tuple[int, int], ...],
    tokenizer_folder: Path | None = None,
    draft_folder: Path | None = None,
) -> EngineConfig:
    """What the engine process is built from."""
    sparse, sparse_above = args.sparse
    return EngineConfig.checked(
        model_path=str(model_folder),
        tokenizer_path=None if tokenizer_folder is None else str(tokenizer_folder),
        load_format=args.load_format,
        dtype=args.dtype,
        quantization=args.quantization,
        device=args.device,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory=args.kv_cache_memory,
        host_kv=args.host_kv,
        host_kv_dtype=args.host_kv_dtype,
        prefill_reserve=args.prefill_reserve,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
        rope_scaling=args.rope_scaling,
        eos_token_ids=eos_token_ids,
        token_id_ranges=token_id_ranges,
        seed=args.seed,
        enforce_eager=args.enforce_eager,
        draft_path=None if draft_folder is None else str(draft_folder),
        num_draft_tokens=args.num_draft_tokens,
        draft_window=args.draft_window,
        sparse=sparse,
        sparse_above=sparse_above,
        working_set_blocks=args.working_set_blocks,
        fetch=args.fetch,
        fetch_ratio=args.fetch_ratio,
        lookahead=args.lookahead,
        verify_drafts=args.verify_drafts,
        miss_policy=args.miss_policy,
    )
