"""Decode speed on the CPU: minserve against transformers' generate, and many streams against one.

Both sides run in this process, in turns, on the same cores, with the same weights, dtype, prompts and number of new
tokens. Reported are medians over the repeats. A decode rate leaves the prompt out: it is the time of N tokens less the
time of one.

    .venv/bin/python tools/bench_cpu.py
    .venv/bin/python tools/bench_cpu.py --model ~/models/Qwen3-0.6B --new-tokens 64 --repeats 3
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from minserve import LLM
from minserve.engine.sizing import cpu_has_bfloat16
from minserve.protocol import SamplingParams
from minserve.text.tokenizer import Tokenizer
from minserve.weights.default_model import ensure_default_model
from minserve.weights.hub import resolve_model

TEXT = (
    "The lighthouse keeper wrote down the weather every evening: the wind, the height of the waves, the ships that "
    "passed, and whether the lamp had burned clean through the night. After thirty years the notebooks filled a wall."
)

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, new tokens of each) -> the new token ids of each, greedy, never ended early."""


class Rate(NamedTuple):
    """Tokens per second of all streams together, and the ids that came out."""

    tokens_per_second: float
    token_ids: list[list[int]]


def minserve_generate(folder: Path, dtype: str, num_streams: int) -> Generate:
    llm = LLM(
        str(folder),
        device="cpu",
        dtype=dtype,
        max_model_len=2048,
        kv_cache_memory=2**30,
        max_num_seqs=num_streams,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return [list(completion.token_ids) for completion in llm.generate(prompts, params)]

    return generate


def transformers_generate(folder: Path, dtype: str) -> Generate:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        token_ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=num_tokens)
        new_ids: list[list[int]] = output[:, token_ids.shape[1] :].tolist()
        return new_ids

    return generate


def decode_rate(generate: Generate, prompts: list[list[int]], num_tokens: int) -> Rate:
    begin = time.perf_counter()
    generate(prompts, 1)
    middle = time.perf_counter()
    token_ids = generate(prompts, num_tokens)
    end = time.perf_counter()
    assert all(len(ids) == num_tokens for ids in token_ids), [len(ids) for ids in token_ids]
    decode_seconds = (end - middle) - (middle - begin)
    return Rate(len(prompts) * (num_tokens - 1) / decode_seconds, token_ids)


def spread(rates: list[Rate]) -> str:
    values = [rate.tokens_per_second for rate in rates]
    return f"{statistics.median(values):9.1f}   {min(values):7.1f} .. {max(values):.1f}"


def median(rates: list[Rate]) -> float:
    return statistics.median(rate.tokens_per_second for rate in rates)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="minserve against transformers, and many streams against one.")
    parser.add_argument("--model", help="folder or hub name (default: the embedded SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="bfloat16" if cpu_has_bfloat16() else "float32"
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--streams", type=int, default=16, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    folder = resolve_model(args.model) if args.model else ensure_default_model()
    prompt = Tokenizer.from_folder(folder).encode(TEXT, add_special_tokens=False)
    # Streams of equal length with different beginnings, so that none of them repeats another's work.
    many = [prompt[index:] + prompt[:index] for index in range(args.streams)]

    ours = minserve_generate(folder, args.dtype, args.streams)
    theirs = transformers_generate(folder, args.dtype)
    for generate in (ours, theirs):
        generate([prompt], 8)
    ours(many, 8)

    our_single: list[Rate] = []
    their_single: list[Rate] = []
    our_many: list[Rate] = []
    for _ in range(args.repeats):
        our_single.append(decode_rate(ours, [prompt], args.new_tokens))
        their_single.append(decode_rate(theirs, [prompt], args.new_tokens))
        our_many.append(decode_rate(ours, many, args.new_tokens))

    same = our_single[0].token_ids == their_single[0].token_ids
    print(
        f"{folder.name}  {args.dtype}  {args.threads} threads  {platform.machine()}  torch {torch.__version__}  "
        f"transformers {transformers.__version__}\n"
        f"prompt {len(prompt)} tokens, {args.new_tokens} new, median of {args.repeats}; "
        f"single-stream token ids {'are equal' if same else 'DIFFER'}\n\n"
        f"decode, tokens/s             median   range\n"
        f"minserve, 1 stream        {spread(our_single)}\n"
        f"transformers, 1 stream    {spread(their_single)}\n"
        f"minserve, {args.streams:2} streams      {spread(our_many)}\n\n"
        f"minserve / transformers, 1 stream   {median(our_single) / median(their_single):.2f}x\n"
        f"{args.streams} streams / 1 stream              {median(our_many) / median(our_single):.2f}x"
    )


if __name__ == "__main__":
    main()
