#!/usr/bin/env python3
"""Decode speed of one long text on a CPU, dense and sparse, in this process, each side after the other.

    python tools/bench_long.py
    python tools/bench_long.py --context 4096 --working-set-blocks 32 --repeats 5

The text is Python's own manual, read densely by all sides; prefixes are cached, so that it is read once by each. A
decode rate leaves the prompt out: the time from the first token to the last, which is where a request is sparse. There
is a second rate, by the processor's time, which other work on the machine disturbs less.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minserve import LLM
from minserve.protocol import SamplingParams
from minserve.weights.default_model import ensure_default_model
from tools.bench_drafts import rates, run
from tools.sparse_eval.texts import Texts

HOST_BYTES = 2**30


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--context", type=int, default=7900, metavar="TOKENS")
    add("--new-tokens", type=int, default=100, metavar="N")
    add("--working-set-blocks", type=int, default=64, metavar="K")
    add("--repeats", type=int, default=3, metavar="N")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    prompt = Texts(ensure_default_model(), None).asked(0, args.context)
    options: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": args.context + args.new_tokens,
        "max_num_seqs": 1,
        "kv_cache_memory": HOST_BYTES,
        "prefill_reserve": 0,
    }
    sparse = {
        "host_kv": HOST_BYTES,
        "sparse": "above",
        "sparse_above": 0,
        "working_set_blocks": args.working_set_blocks,
    }
    sides = {
        "dense": LLM(draft="none", **options),
        "sparse, by this step's query": LLM(draft="none", **options, **sparse),
        "sparse, by a draft": LLM(num_draft_tokens=1, **options, **sparse),
    }
    params = SamplingParams(max_tokens=args.new_tokens, temperature=0.0, ignore_eos=True)
    run(tuple(sides.values()), [prompt], params)
    measured = [run(tuple(sides.values()), [prompt], params) for _ in range(args.repeats)]
    size = f"{len(prompt)} tokens and {args.new_tokens} more, K {args.working_set_blocks}"
    print(f"{size}, {torch.get_num_threads()} threads, median of {args.repeats}")
    print(f"{'':30} tokens/s   by the clock   by the processor's time")
    dense = rates([repeat[0] for repeat in measured])
    for number, name in enumerate(sides):
        own = rates([repeat[number] for repeat in measured])
        print(f"{name:30} {own[0]:8.2f} {own[0] / dense[0]:13.2f}x {own[1] / dense[1]:24.2f}x")


if __name__ == "__main__":
    main()
