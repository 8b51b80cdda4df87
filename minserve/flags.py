"""The flags of the command: names, aliases, values, one line of help each.

Owns: the flags, and those of other servers that this version refuses.
Does not know: what the flags do.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from minserve import __version__
from minserve.flag_values import (
    api_key,
    draft_tokens,
    draft_window,
    file_text,
    host_kv,
    number,
    only_one,
    origins,
    parse_size,
    parse_size_or_zero,
    rope_scaling,
    sparse,
)
from minserve.protocol import MAX_DRAFT_TOKENS

NOT_SUPPORTED: dict[str, str] = {
    "--speculative-config": "",
    "--speculative-algorithm": "",
    "--cpu-offload-gb": "",
    "--swap-space": "",
    "--kv-cache-dtype": "",
    "--pipeline-parallel-size": "",
    "-pp": "",
    "--data-parallel-size": "",
    "-dp": "",
    "--enable-expert-parallel": "",
    "--enable-lora": "",
    "--lora-modules": "",
    "--guided-decoding-backend": "",
    "--trust-remote-code": "no code from model folders is ever run",
    "--block-size": "a block is always 16 tokens",
    "--page-size": "a block is always 16 tokens",
    "--ssl-keyfile": "put a proxy in front",
    "--ssl-certfile": "put a proxy in front",
    "--chat-template-content-format": "",
}
"""Flags of vLLM, of SGLang and of later versions, with why or what instead."""


class _Refuse(argparse.Action):
    """A flag that is known and not supported: one clear line."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        name = self.option_strings[0]
        why = NOT_SUPPORTED[name]
        parser.exit(2, f"{parser.prog}: {name}: not supported by this version{f' ({why})' if why else ''}\n")


class _Words(argparse.Action):
    """A flag whose value may be several words: `type` is given all of them, joined by spaces."""

    def __init__(self, *, type: Callable[[str], Any], **options: Any) -> None:
        super().__init__(nargs="+", **options)
        self._value_of = type

    def __call__(
        self, _parser: argparse.ArgumentParser, args: argparse.Namespace, words: Any, _name: str | None = None
    ) -> None:
        try:
            setattr(args, self.dest, self._value_of(" ".join(words)))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


class _Help(argparse.HelpFormatter):
    """One line an option: of several names the first is shown, and those that switch it off."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = [name for name in action.option_strings if name.startswith("--no-")] or action.option_strings[:1]
        if isinstance(action, argparse._HelpAction):
            shown = list(action.option_strings)
        if action.nargs == 0:
            return ", ".join(shown)
        if isinstance(action, _Words):
            return f"{shown[0]} {action.metavar}"
        return f"{shown[0]} {self._format_args(action, self._get_default_metavar_for_optional(action))}"


class _Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked; a mistake is told in one line and ends the process with 2."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.enable_auto_tool_choice != (args.tool_call_parser is not None):
        parser.error("--enable-auto-tool-choice and --tool-call-parser belong together: give both or neither")
    if args.revision is not None and args.model is None:
        parser.error("--revision is a revision of --model, which is not given")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = _Parser(
        prog="minserve",
        description="Serve a language model over the OpenAI API. Without --model: SmolLM2-135M-Instruct.",
        usage="minserve [--model MODEL] [options]",
        allow_abbrev=False,
        add_help=False,
        epilog="vLLM's and SGLang's names of these options are taken too.",
        formatter_class=_Help,
    )
    _add_model_flags(parser.add_argument_group("model"))
    _add_server_flags(parser.add_argument_group("server"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_draft_flags(parser.add_argument_group("speculation"))
    _add_sparse_flags(parser.add_argument_group("sparse requests"))
    general = parser.add_argument_group("general")
    general.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default info"
    )
    general.add_argument("--log-format", choices=("text", "json"), default="text", help="json: an object a line")
    general.add_argument("--version", action="version", version=f"minserve {__version__}", help="print the version")
    general.add_argument("-h", "--help", action="help", help="print this")
    for name in NOT_SUPPORTED:
        parser.add_argument(name, action=_Refuse, nargs="*", help=argparse.SUPPRESS, dest=argparse.SUPPRESS)
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", "--model-path", metavar="MODEL", help="a folder, a .gguf file or a Hugging Face name")
    add("--revision", metavar="REV", help="branch, tag or commit of a Hugging Face model")
    add("--tokenizer", "--tokenizer-path", metavar="NAME", help="folder or name, if not the model's own")
    add("--chat-template", type=file_text, metavar="FILE", help="a Jinja file, in place of the model's own template")
    add("--served-model-name", nargs="+", metavar="NAME", help="what clients call it (default: MODEL)")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of weights and KV")
    add(
        "--quantization",
        "-q",
        choices=("fp8",),
        help="weights of layers in 8 bits (default: as the checkpoint has them)",
    )
    add("--max-model-len", "--context-length", type=parse_size, metavar="N", help="context in tokens, also 64k")
    add("--rope-scaling", type=rope_scaling, metavar="JSON", help='such as {"rope_type": "yarn", "factor": 4.0}')


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1; 0.0.0.0: from anywhere)")
    add("--port", type=number(int, 0, 65535), default=8000, help="default 8000; 0: any free one")
    add(
        "--api-key",
        nargs="+",
        action="extend",
        type=api_key,
        default=[],
        metavar="KEY",
        help="needed to call; or MINSERVE_API_KEY",
    )
    add("--enable-auto-tool-choice", action="store_true", help="let the model call tools (with --tool-call-parser)")
    add("--tool-call-parser", metavar="NAME", help="the format of the model's tool calls, such as hermes")
    add("--reasoning-parser", default="auto", metavar="NAME", help="auto (default: if the template tells), none, qwen3")
    add("--max-num-waiting", type=number(int, 0), default=1024, metavar="N", help="queue length (default 1024)")
    add("--max-requests-per-key", type=number(int, 1), metavar="N", help="running or waiting (default: no limit)")
    add("--max-connections", type=number(int, 1), default=4096, metavar="N", help="clients (default 4096)")
    add("--max-request-bytes", type=parse_size, metavar="SIZE", help="default: by the context, at least 4MiB")
    add(
        "--allowed-origins",
        nargs="+",
        action="extend",
        type=origins,
        default=[],
        metavar="ORIGIN",
        help="whose web pages may call (CORS; default none, * all)",
    )
    add("--no-page", dest="page", action="store_false", help="nothing for people at / (default: a page)")
    add(
        "--engine-timeout",
        type=number(float, 2),
        default=120.0,
        metavar="S",
        help="silent engine is dead (default 120)",
    )
    add("--shutdown-timeout", type=number(float, 0), default=30.0, metavar="S", help="seconds to finish (default 30)")


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one")
    add(
        "--max-num-seqs",
        "--max-running-requests",
        type=number(int, 1, 4096),
        metavar="N",
        help="requests at once (default 256; 64 on a CPU)",
    )
    add(
        "--max-num-batched-tokens",
        "--chunked-prefill-size",
        type=parse_size,
        metavar="N",
        help="tokens of prompts in a step, beside its decodes (default 2048; 512 on a CPU)",
    )
    add("--kv-cache-memory", "--kv-cache-memory-bytes", type=parse_size, metavar="SIZE", help="for KV, such as 8GiB")
    add(
        "--host-kv",
        type=host_kv,
        default=0,
        metavar="SIZE",
        help="host memory for KV without a page, or auto (default 0)",
    )
    add(
        "--host-kv-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8: in 8 bits there; what comes back is rounded (default: as in pages)",
    )
    add(
        "--prefill-reserve",
        type=parse_size_or_zero,
        default=0,
        metavar="N",
        help="tokens of KV kept for the next prompt (default 0)",
    )
    add(
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        type=number(float, 0.01, 1),
        default=0.9,
        metavar="F",
        help="share of the GPU's memory to use (default 0.9)",
    )
    add(
        "--enforce-eager",
        "--disable-cuda-graph",
        action="store_true",
        help="launch decode steps anew, not from CUDA graphs",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute equal beginnings anew (default: reuse their KV)",
    )
    add("--disable-radix-cache", dest="enable_prefix_caching", action="store_false", help=argparse.SUPPRESS)
    add("--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N", help="of dummy weights (default 0)")
    add(
        "-tp",
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        type=only_one,
        default=1,
        metavar="1",
        help="GPUs: only 1 yet",
    )


def _add_draft_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--draft", metavar="NAME", help="EAGLE-3 head: folder, hub name, or none (default: the model's own, if any)")
    add(
        "--num-draft-tokens",
        type=draft_tokens,
        metavar="N",
        help="drafts a step, 1 to 8 (default auto: 0, 1 or 3, what pays)",
    )
    add(
        "--draft-window",
        type=draft_window,
        default=2048,
        metavar="N",
        help="tokens that the head looks back (default 2048)",
    )


def _add_sparse_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--sparse",
        action=_Words,
        type=sparse,
        default=("pressure", 0),
        metavar="never|pressure|above N",
        help="who gives up pages (default pressure; without --host-kv nobody)",
    )
    add(
        "--working-set-blocks",
        type=number(int, 1, 4096),
        default=128,
        metavar="N",
        help="blocks of 16 tokens that such a request keeps (default 128)",
    )
    add(
        "--fetch",
        choices=("fixed", "adaptive"),
        default="adaptive",
        help="blocks that come in: a cap on each step, or on the mean (default)",
    )
    add(
        "--fetch-ratio",
        type=number(float, 0.001, 1),
        default=0.05,
        metavar="F",
        help="that cap, as a share of the blocks that are kept (default 0.05)",
    )
    add(
        "--lookahead", choices=("draft", "current"), help="whose query says what to fetch (default: draft, with a head)"
    )
    add(
        "--verify-drafts",
        type=number(int, 0, MAX_DRAFT_TOKENS),
        metavar="N",
        help="drafts that a step accepts (default 0)",
    )
    add(
        "--miss-policy",
        choices=("approximate", "retry", "recall"),
        default="retry",
        help="where blocks are missing: go on, run again (default), wait for all",
    )
