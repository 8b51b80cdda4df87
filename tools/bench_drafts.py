"""Speed of single-stream chat with a draft head, and without, in this process and in turns.

    python tools/bench_drafts.py
    python tools/bench_drafts.py --model MODEL --draft HEAD --device cuda --num-draft-tokens 3 --temperature 0.7

Every chat is asked alone, its prefix is not cached, and its decode rate leaves the prompt out: the time from the first
token to the last. The rate of a side is all its tokens over all its seconds; printed are medians over the repeats. In
float32 greedy texts must be equal. With OUT set, every figure is also a line in $OUT/bench_drafts.json.
"""

import argparse
import platform
import statistics
import time
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


class Run(NamedTuple):
    """What all chats of one repeat came to. num_drafts, accepted: of draft tokens."""

    seconds: float
    texts: list[list[int]]
    num_drafts: int
    accepted: int

    @property
    def rate(self) -> float:
        return sum(len(text) - 1 for text in self.texts) / self.seconds


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Run:
    seconds, texts, num_drafts, accepted = 0.0, [], 0, 0
    for number, prompt in enumerate(prompts):
        llm.engine.submit(Submit(str(number), prompt, params))
        text: list[int] = []
        begin = end = 0.0
        while llm.engine.has_work:
            for delta in llm.engine.step().deltas:
                if delta.token_ids:
                    end = time.perf_counter()
                    begin = begin or end
                text += delta.token_ids
                if delta.finish_reason is not None:
                    num_drafts, accepted = num_drafts + delta.draft_tokens, accepted + delta.accepted_tokens
        seconds += end - begin
        texts.append(text)
    return Run(seconds, texts, num_drafts, accepted)


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
    for llm in (plain, drafting):
        run(llm, prompts[:2], params)
    runs = [(run(plain, prompts, params), run(drafting, prompts, params)) for _ in range(args.repeats)]

    info = plain.engine.info
    rates = [statistics.median(each[side].rate for each in runs) for side in (0, 1)]
    drafted = runs[0][1]
    same = sum(a == b for a, b in zip(runs[0][0].texts, drafted.texts))
    num_tokens = sum(map(len, drafted.texts))
    tokens_per_step = num_tokens / (num_tokens - drafted.accepted)
    figures = {"plain": rates[0], "drafting": rates[1], "tokens_per_step": tokens_per_step, "equal": same}
    record("bench_drafts", device=info.device, dtype=info.dtype, temperature=args.temperature, **figures)
    threads = f", {torch.get_num_threads()} threads of {platform.machine()}" if info.device == "cpu" else ""
    print(
        f"{info.device}{threads}, {info.dtype}, torch {torch.__version__}; {len(CHATS)} chats of "
        f"{args.new_tokens} tokens, temperature {args.temperature:g}, median of {args.repeats}\n"
        f"{drafting.engine.info.draft}\n"
        f"without drafts   {rates[0]:9.1f} tokens/s\n"
        f"with drafts      {rates[1]:9.1f} tokens/s   {rates[1] / rates[0]:.2f}x\n"
        f"{tokens_per_step:.2f} tokens a step; {drafted.accepted} of {drafted.num_drafts} drafts accepted; "
        f"{same} of {len(CHATS)} texts equal"
    )


if __name__ == "__main__":
    main()
