"""Speed of single-stream chat with a draft head, and without, in this process, each chat by one and then the other.

    python tools/bench_drafts.py
    python tools/bench_drafts.py --model MODEL --draft HEAD --device cuda --num-draft-tokens 3 --temperature 0.7

Every chat is asked alone, its prefix is not cached, and its decode rate leaves the prompt out: the time from the first
token to the last. The rate of a side is all its tokens over all its seconds; printed are medians over the repeats. On a
CPU there is a second rate, by the processor's time, which other work on the machine disturbs less; OMP_NUM_THREADS=1
gives both sides one core. In float32 greedy texts must be equal. With OUT set, every figure is also a line in
$OUT/bench_drafts.json.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from workload import record

from minserve import LLM
from minserve.protocol import SamplingParams, Submit

CHATS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain step by step how rain forms, so that a child understands it.",
    "What are the advantages and disadvantages of working from home?",
    "Give me a recipe for pancakes, with amounts and steps.",
    "Write a polite e-mail to a landlord about a broken heater.",
    "Summarize the water cycle in three sentences, then list its four stages.",
    "How do I prepare for a job interview? Answer with a numbered list.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
)


class Times(NamedTuple):
    """Seconds."""

    clock: float
    processor: float


class Side:
    """What one side has said so far in a repeat. seconds, cpu_seconds: decoding; num_drafts, accepted: draft tokens."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.texts: list[list[int]] = []
        self.num_drafts = self.accepted = 0

    @property
    def num_decoded(self) -> int:
        """Tokens but the first of each text."""
        return sum(len(text) - 1 for text in self.texts)

    def answer(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        llm.engine.submit(Submit(str(len(self.texts)), prompt, params))
        text: list[int] = []
        begin = end = Times(0.0, 0.0)
        while llm.engine.has_work:
            for delta in llm.engine.step().deltas:
                if delta.token_ids:
                    end = Times(time.perf_counter(), time.process_time())
                    begin = begin if text else end
                text += delta.token_ids
                if delta.finish_reason is not None:
                    self.num_drafts += delta.draft_tokens
                    self.accepted += delta.accepted_tokens
        self.seconds += end.clock - begin.clock
        self.cpu_seconds += end.processor - begin.processor
        self.texts.append(text)


def run(llms: Sequence[LLM], prompts: list[list[int]], params: SamplingParams) -> list[Side]:
    sides = [Side() for _ in llms]
    for prompt in prompts:
        for side, llm in zip(sides, llms):
            side.answer(llm, prompt, params)
    return sides


def rates(sides: Sequence[Side]) -> tuple[float, float]:
    """Tokens a second of some repeats of a side, by the clock and by the processor's time: medians."""
    return (
        statistics.median(side.num_decoded / side.seconds for side in sides),
        statistics.median(side.num_decoded / side.cpu_seconds for side in sides),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="folder or hub name (default: the embedded SmolLM2-135M-Instruct)")
    add("--draft", help="folder or hub name of the head (default: the default model's own)")
    add("--num-draft-tokens", type=int, metavar="N", help="as minserve's (default: the server chooses)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--temperature", type=float, default=0.0)
    add("--new-tokens", type=int, default=200, metavar="N")
    add("--repeats", type=int, default=3, metavar="N")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.model and not args.draft:
        raise SystemExit("--model has no head of its own: name one with --draft")
    options: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "max_model_len": 2048,
        "kv_cache_memory": 2**28,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    plain = LLM(args.model, draft="none", **options)
    drafting = LLM(args.model, draft=args.draft, num_draft_tokens=args.num_draft_tokens, **options)
    params = SamplingParams(max_tokens=args.new_tokens, temperature=args.temperature, seed=1, ignore_eos=True)
    chats = [plain.chat_template.render([{"role": "user", "content": chat}]) for chat in CHATS]
    prompts = [plain.tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    run((plain, drafting), prompts[:2], params)
    runs = [run((plain, drafting), prompts, params) for _ in range(args.repeats)]

    info = plain.engine.info
    (without, without_cpu), (with_drafts, with_drafts_cpu) = (rates([sides[side] for sides in runs]) for side in (0, 1))
    drafted = runs[0][1]
    same = sum(a == b for a, b in zip(runs[0][0].texts, drafted.texts))
    num_tokens = sum(map(len, drafted.texts))
    tokens_per_step = num_tokens / (num_tokens - drafted.accepted)
    figures = {"plain": without, "drafting": with_drafts, "tokens_per_step": tokens_per_step, "equal": same}
    on_cpu = info.device == "cpu"
    if on_cpu:
        figures |= {"plain_cpu": without_cpu, "drafting_cpu": with_drafts_cpu}
    record("bench_drafts", device=info.device, dtype=info.dtype, temperature=args.temperature, **figures)
    threads = f", {torch.get_num_threads()} threads of {platform.machine()}" if on_cpu else ""
    by_processor = f"; {with_drafts_cpu / without_cpu:.2f}x by the processor's time" if on_cpu else ""
    print(
        f"{info.device}{threads}, {info.dtype}, torch {torch.__version__}; {len(CHATS)} chats of "
        f"{args.new_tokens} tokens, temperature {args.temperature:g}, median of {args.repeats}\n"
        f"{drafting.engine.info.draft}\n"
        f"without drafts   {without:9.1f} tokens/s\n"
        f"with drafts      {with_drafts:9.1f} tokens/s   {with_drafts / without:.2f}x{by_processor}\n"
        f"{tokens_per_step:.2f} tokens a step; {drafted.accepted} of {drafted.num_drafts} drafts accepted; "
        f"{same} of {len(CHATS)} texts equal"
    )


if __name__ == "__main__":
    main()
