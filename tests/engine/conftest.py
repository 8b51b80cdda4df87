"""The default model, fetched once, for the engine and for transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from minserve.text.chat import ChatTemplate
from minserve.text.tokenizer import Tokenizer
from minserve.weights.default_model import ensure_default_model
from tests.engine.prompts import CHATS, PLAIN


@pytest.fixture(scope="session")
def smollm2():
    """The folder of SmolLM2-135M-Instruct."""
    return ensure_default_model(progress=False)


@pytest.fixture(scope="session")
def prompts(smollm2):
    """Twenty prompts as token ids."""
    tokenizer, template = Tokenizer.from_folder(smollm2), ChatTemplate.from_folder(smollm2)
    chats = [template.render([{"role": "user", "content": text}]) for text in CHATS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in chats + PLAIN]


@pytest.fixture(scope="session")
def transformers_model(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture(scope="session")
def transformers_outputs(transformers_model, prompts):
    """Greedy, 64 tokens each, and before each token how far the two largest logits are apart."""
    longest = max(map(len, prompts))
    result = transformers_model.generate(
        torch.tensor([[2] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=[2, 0],
        pad_token_id=2,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = torch.stack(result.logits, dim=1).topk(2).values
    gaps = (top[..., 0] - top[..., 1]).tolist()
    tokens = result.sequences[:, longest:].tolist()
    lengths = [next((at + 1 for at, token in enumerate(row) if token in (2, 0)), len(row)) for row in tokens]
    return [(row[:length], gap[:length]) for row, gap, length in zip(tokens, gaps, lengths, strict=True)]
