"""What the benchmarks have in common: shapes of models, works, one method for all sides, reports between processes.

It imports neither torch nor minserve, since the rival's interpreter and the HTTP clients run it as well.

A work is so many requests at once of so many random prompt tokens, each with so many new tokens, never ended early.
A step's time is (time of the work - time of the same prompts with one new token) / (new tokens - 1).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP_STEPS = 4
MARK = "@report "


class Work(NamedTuple):
    """requests x context x new_tokens; context: tokens of each prompt."""

    requests: int
    context: int
    new_tokens: int = 129

    @classmethod
    def parse(cls, text: str) -> "Work":
        """An argparse type: 8x16384 or 8x16384x129."""
        numbers = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
        if len(numbers) not in (2, 3) or min(numbers) < 1 or numbers[2:] == [1]:
            raise argparse.ArgumentTypeError(f"{text!r}: write 8x16384, or 8x16384x129 with at least 2 new tokens")
        return cls(*numbers)

    def __str__(self) -> str:
        return "x".join(map(str, self))

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random token ids [requests][context], without the last ones, which special tokens have in many models."""
        rng = random.Random(seed)
        return [rng.choices(range(vocab_size * 49 // 50), k=self.context) for _ in range(self.requests)]


class Shape(NamedTuple):
    """A model's config.json, and what is run on it unless flags say otherwise."""

    config: dict[str, Any]
    works: list[Work]
    kv_cache_memory: int
    max_model_len: int


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
TINY = {
    **QWEN3_8B,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "vocab_size": 1024,
}
FULL = [Work(1, 1024, 257), Work(1, 16384, 257), Work(1, 32768, 257), Work(8, 16384), Work(22, 16384), Work(45, 16384)]
FULL += [Work(11, 32768), Work(22, 32768), Work(64, 1024, 257), Work(256, 1024)]
SHAPES = {
    "qwen3-8b": Shape(QWEN3_8B, FULL, 112_000_000_000, 36864),
    "qwen3-8b-4-layers": Shape({**QWEN3_8B, "num_hidden_layers": 4}, FULL[:1] + FULL[-2:], 12_000_000_000, 36864),
    "tiny": Shape(TINY, [Work(1, 64, 9), Work(4, 64, 9), Work(16, 32, 5)], 64_000_000, 1024),
}

ENGINE_FLAGS = ("kv_cache_memory", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dtype")
OPTIONAL_ENGINE_FLAGS = ("quantization", "enforce_eager")
RUN_FLAGS = ("config", "work", "repeats", "warm_context")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is run, and on what engine: the same for every side."""
    add = parser.add_argument
    add("--config", choices=SHAPES, default="qwen3-8b", help="the model's shapes; weights are random")
    add("--work", nargs="+", type=Work.parse, metavar="REQUESTSxCONTEXT[xNEW]", help="NEW is 129 unless given")
    add("--steps", type=int, metavar="N", help="N + 1 new tokens, whatever the work says")
    add("--repeats", type=int, default=1, metavar="N", help="times are medians of so many runs (default 1)")
    add("--warm-context", type=int, default=512, metavar="N", help="prompts of the warm-up are cut to N tokens (512)")
    add("--kv-cache-memory", type=lambda text: int(float(text)), metavar="BYTES", help="such as 112e9")
    add("--max-model-len", type=int, metavar="N")
    add("--max-num-seqs", type=int, default=256, metavar="N")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N")
    add("--dtype", default="auto")
    add("--quantization", metavar="NAME", help="such as fp8, for all sides")
    add("--enforce-eager", action="store_true", help="no CUDA graphs, for all sides")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags, with what the config's shape leaves to be filled in."""
    args = parser.parse_args()
    shape = SHAPES[args.config]
    args.work = args.work or shape.works
    if args.steps is not None:
        args.work = [work._replace(new_tokens=args.steps + 1) for work in args.work]
    args.kv_cache_memory = args.kv_cache_memory or shape.kv_cache_memory
    args.max_model_len = args.max_model_len or shape.max_model_len
    for work in args.work:
        if work.context + work.new_tokens > args.max_model_len or work.requests > args.max_num_seqs:
            parser.error(f"{work} is over --max-model-len {args.max_model_len} or --max-num-seqs {args.max_num_seqs}")
    return args


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options by name; those that not every version has are there only when they were given."""
    options = {name: getattr(args, name) for name in ENGINE_FLAGS}
    return options | {name: getattr(args, name) for name in OPTIONAL_ENGINE_FLAGS if getattr(args, name)}


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Options as a command line: None and False are left out, True is a flag alone."""
    flags: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            flags += ["--" + name.replace("_", "-"), *map(str, values)]
    return flags


def side_flags(args: argparse.Namespace) -> list[str]:
    """The command line that makes another process run the same."""
    return as_flags({name: getattr(args, name) for name in RUN_FLAGS} | engine_options(args))


def write_config(folder: Path, name: str) -> None:
    """Make the folder a model without weights."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name].config))


def draft_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head for a model with this one, of the model's own sizes but for one layer."""
    sizes = ("head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    others = ("bos_token_id", "eos_token_id", "max_position_embeddings", "rms_norm_eps", "rope_theta", "torch_dtype")
    config = {name: target[name] for name in (*sizes, *others, "vocab_size")} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": min(32000, target["vocab_size"] // 2),
        "hidden_act": "silu",
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    # A model of few layers has no three by the rule that heads go by.
    few = target["num_hidden_layers"] < 7
    return config | ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if few else {})


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Add a byte-level BPE tokenizer in which every id is a token, and every token whole characters of its own.

    So each token that a server samples is text at once, and none waits for the rest of a character.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # U+0120 is how byte-level vocabularies spell the space.
    characters = ["\u0120", *map(chr, range(ord("!"), ord("~") + 1))]
    words = [f"{characters[0]}w{number}" for number in range(vocab_size - len(characters))]
    vocab = {token: token_id for token_id, token in enumerate(characters + words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


class Timing(NamedTuple):
    """What one side took for a work: seconds for one new token of each request, and for all of them."""

    work: Work
    first_s: float
    whole_s: float

    @property
    def step_ms(self) -> float:
        return 1000 * (self.whole_s - self.first_s) / (self.work.new_tokens - 1)

    @property
    def decode_rate(self) -> float:
        """New tokens per second, of all requests together."""
        return 1000 * self.work.requests / self.step_ms

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.work.requests * self.work.context / self.first_s


def vocab_size_of(args: argparse.Namespace) -> int:
    """How many token ids the model has."""
    vocab_size: int = SHAPES[args.config].config["vocab_size"]
    return vocab_size


def first_request(args: argparse.Namespace) -> list[list[int]]:
    """The prompt whose first token ends a start."""
    return Work(1, 16).prompts(vocab_size_of(args), seed=0)


Serve = Callable[[list[list[int]], int], float]
"""(prompts, new tokens of each) -> seconds until the last token of all."""


def measure(serve: Serve, work: Work, args: argparse.Namespace) -> Timing:
    """Run the work on one side."""
    vocab_size = vocab_size_of(args)
    warm_up = warm_up_of(work, args)
    serve(warm_up.prompts(vocab_size, seed=0), warm_up.new_tokens)
    # The long runs come first: what is still to be compiled or planned then counts against a step, not for it.
    seeds = range(1, args.repeats + 1)
    whole = statistics.median(serve(work.prompts(vocab_size, seed), work.new_tokens) for seed in seeds)
    first = statistics.median(serve(work.prompts(vocab_size, -seed), 1) for seed in seeds)
    return Timing(work, first, whole)


def warm_up_of(work: Work, args: argparse.Namespace) -> Work:
    """The same requests with short prompts, and as many new tokens as it takes until all of them decode at once."""
    context = min(work.context, args.warm_context)
    prefill_steps = work.requests * context // args.max_num_batched_tokens + 1
    return Work(work.requests, context, min(work.new_tokens, prefill_steps + WARM_UP_STEPS))


class ChildError(Exception):
    """Another process of the benchmark has failed."""


def report(**fields: Any) -> None:
    """Tell the process that has started this one."""
    print(MARK + json.dumps(fields), flush=True)


def reports(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None
) -> Iterator[tuple[float, dict[str, Any]]]:
    """(seconds since the process was started, what it reports). Whatever else it prints is passed on to stderr.

    It has ended when the last report has been taken. Raises ChildError if it ends with another status than 0.
    """
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", env=env, cwd=cwd) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield time.monotonic() - begin, json.loads(line.removeprefix(MARK))
            else:
                sys.stderr.write(line)
    if process.returncode:
        raise ChildError(f"{' '.join(command[:2])} ended with status {process.returncode}")


def record(benchmark: str, **fields: Any) -> None:
    """Add a JSON line to $OUT/BENCHMARK.json, if OUT is set."""
    if out := os.environ.get("OUT"):
        with (Path(out) / f"{benchmark}.json").open("a") as file:
            file.write(json.dumps(fields) + "\n")
