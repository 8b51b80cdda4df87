"""What a head is worth: tokens a step by the engine, for chats and for documents of several lengths.

Owns: what is measured, and the table. Does not know: training.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from minserve.llm import LLM
from minserve.protocol import Submit

from .answers import Lengths, prompt_ids, sampling
from .prompts import Prompt

TEMPERATURES = (0.0, 0.7)


class Row(NamedTuple):
    """One group of prompts at one temperature. context: tokens of a text at most; right: how often the first draft was
    accepted, the first two were, ...; tokens_per_step counts the token that each step gives anyhow."""

    group: str
    context: int
    temperature: float
    num_prompts: int
    num_steps: int
    right: list[float]
    tokens_per_step: float


def evaluate(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    lengths: Lengths,
    contexts: Sequence[int],
    num_chats: int,
    num_documents: int,
) -> Iterator[Row]:
    """llm: with the head, and a fixed number of drafts. Takes the first held-out prompts of each group."""
    held_out = [prompt for prompt in prompts if prompt.held_out]
    for group in sorted({prompt.group for prompt in held_out}):
        members = [prompt for prompt in held_out if prompt.group == group]
        if members[0].kind == "chat":
            yield from _measure(llm, group, members[:num_chats], lengths._replace(longest=1024))
            continue
        longest = max(len(prompt.text) for prompt in members)
        long_ones = [prompt for prompt in members if len(prompt.text) > longest // 2][:num_documents]
        for context in contexts:
            if context <= llm.engine.info.max_model_len:
                yield from _measure(llm, group, long_ones, lengths._replace(longest=context))


def _measure(llm: LLM, group: str, prompts: Sequence[Prompt], lengths: Lengths) -> Iterator[Row]:
    room = min(lengths.longest, llm.engine.info.max_model_len)
    for temperature in TEMPERATURES:
        # A prefix that is found has no entries of the head, as a first request's has.
        llm.engine.clear_prefix_cache()
        num_prompts = 0
        for number, prompt in enumerate(prompts):
            ids = prompt_ids(llm, number, prompt, lengths)
            wanted = min(lengths.answer(prompt), room - len(ids))
            if wanted > 0:
                params = sampling(number, wanted, temperature)
                llm.engine.submit(Submit(f"{group} {number}", ids, params))
                num_prompts += 1
        num_drafts, right = _steps(llm)
        yield Row(
            group,
            room,
            temperature,
            num_prompts,
            num_drafts,
            [round(count / max(1, num_drafts), 4) for count in right],
            round(1 + sum(right) / max(1, num_drafts), 3),
        )


def _steps(llm: LLM) -> tuple[int, list[int]]:
    """Serve what was submitted: (steps that verified drafts, how often each draft was accepted)."""
    before: tuple[int, list[int]] | None = None
    after: tuple[int, list[int]] = (0, [])
    while llm.engine.has_work:
        stats = llm.engine.step().stats
        after = (stats.num_drafts, list(stats.accepted_at))
        # The first step computes prompts: nobody has drafts to verify yet.
        before = before or after
    assert before is not None
    counts = [new - old for new, old in zip(after[1], before[1])]
    while counts and not counts[-1]:
        counts.pop()
    return after[0] - before[0], counts


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = ["group              context  temperature  prompts  tokens/step  accepted"]
    for row in rows:
        right = " ".join(f"{share:.2f}" for share in row.right)
        lines.append(
            f"{row.group:18} {row.context:7}  {row.temperature:11}  {row.num_prompts:7}  {row.tokens_per_step:11.2f}"
            f"  {right}"
        )
    return "\n".join(lines)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row._asdict()) + "\n" for row in rows))
