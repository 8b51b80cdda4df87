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
    outputs = []
    for prompt in prompts:
        result = transformers_model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=[2, 0],
            pad_token_id=2,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.stack([logits[0] for logits in result.logits]).topk(2).values
        outputs.append((result.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist()))
    return outputs
