"""A long chat: how soon each turn's first token comes when its prefix is cached, against a cold start.

A document of about --tokens tokens is asked about in --turns turns. Each turn is served warm (with the cache as the
turns before have left it) and cold (with every cached prefix forgotten), and must get the same answer. With --small,
pages hold little more than one conversation, and another long prompt runs between turns, so that the prefix comes from
host blocks.

    .venv/bin/python tools/bench_prefix.py
    .venv/bin/python tools/bench_prefix.py --small --cold-turns 4
"""

import argparse
import statistics
import time
from collections.abc import Iterator

from minserve import LLM
from minserve.engine.sizing import GIB
from minserve.protocol import SamplingParams, Submit

QUESTION = "Question {n}: which number belongs to item {item}? Answer in one short sentence."


def document(llm: LLM, num_tokens: int) -> str:
    """An inventory of about num_tokens tokens."""
    lines: list[str] = []
    size = 0
    while size < num_tokens:
        lines.append(f"Item {len(lines)} is a box of {(len(lines) * 7919) % 1000} screws on shelf {len(lines) % 13}.")
        size += len(llm.tokenizer.encode(lines[-1], add_special_tokens=False))
    return "\n".join(lines)


def serve(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[float, list[int], int, int]:
    """Seconds to the first token, the tokens, and how many of the prompt were cached on the device and on the host."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    llm.engine.submit(Submit(request_id="turn", prompt_token_ids=prompt, params=params))
    begin = time.perf_counter()
    first, tokens, cached, on_host = 0.0, list[int](), 0, 0
    while llm.engine.has_work:
        for delta in llm.engine.step().deltas:
            first = first or time.perf_counter() - begin
            tokens += delta.token_ids
            cached, on_host = delta.cached_tokens or cached, delta.cached_host_tokens or on_host
    return first, tokens, cached - on_host, on_host


def turns(llm: LLM, text: str, num_turns: int, num_tokens: int) -> Iterator[tuple[list[int], list[dict[str, str]]]]:
    """The prompt of each turn; the caller puts its answer into the messages before it asks for the next."""
    messages = [{"role": "system", "content": text}]
    for turn in range(num_turns):
        messages.append({"role": "user", "content": QUESTION.format(n=turn + 1, item=turn * 11)})
        yield llm.tokenizer.encode(llm.chat_template.render(messages), add_special_tokens=False), messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--cold-turns", type=int, help="how many turns are served cold too (default: all)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--small", action="store_true", help="few pages; prefixes come from host blocks")
    args = parser.parse_args()
    memory = {"kv_cache_memory": int(0.36 * GIB), "host_kv": 2 * GIB} if args.small else {"kv_cache_memory": GIB}
    llm = LLM(args.model, draft="none", max_num_seqs=4, dtype=args.dtype, **memory)
    other = llm.tokenizer.encode("Something else. " * 2000, add_special_tokens=False)[:7000]
    ratios = []
    print("turn  prompt  device   host   warm s   cold s   ratio  same answer")
    for turn, (prompt, messages) in enumerate(turns(llm, document(llm, args.tokens), args.turns, args.answer_tokens)):
        if args.small and turn:
            serve(llm, other, 1)
        warm, tokens, device, host = serve(llm, prompt, args.answer_tokens)
        line = f"{turn + 1:4d}  {len(prompt):6d}  {device:6d} {host:6d} {warm:8.2f}"
        if turn and (args.cold_turns is None or turn % max(1, args.turns // args.cold_turns) == 0):
            llm.engine.clear_prefix_cache()
            cold, cold_tokens, _, _ = serve(llm, prompt, args.answer_tokens)
            ratios.append(warm / cold)
            line += f" {cold:8.2f} {warm / cold:7.3f}  {tokens == cold_tokens}"
        print(line, flush=True)
        messages.append({"role": "assistant", "content": llm.tokenizer.decode(tokens)})
    print(f"warm / cold: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}")


if __name__ == "__main__":
    main()
