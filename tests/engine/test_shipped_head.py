"""The default model's own draft head, as it is shipped: that it drafts, and drafts well."""

import pytest

from minserve import LLM
from minserve.weights.default_model import DEFAULT_HEAD

CHATS = (
    "Why do cats purr?",
    "Write a short note to my colleague that I will be late for the meeting.",
    "What is the difference between weather and climate?",
    "List five things to see in Lisbon.",
)
"""Forms and topics that training has not seen."""


@pytest.mark.slow
def test_a_step_gives_well_over_one_token_in_chats(smollm2):
    llm = LLM(
        str(smollm2), draft=str(DEFAULT_HEAD), num_draft_tokens=3, device="cpu", dtype="float32", kv_cache_memory=2**26
    )
    chats = [llm.chat_template.render([{"role": "user", "content": chat}]) for chat in CHATS]
    prompts = [llm.tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    answers = llm.generate(prompts, max_tokens=48, ignore_eos=True)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    num_steps = num_tokens - sum(answer.accepted_tokens for answer in answers)
    assert num_tokens / num_steps > 1.8
