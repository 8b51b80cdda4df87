"""From the name of an architecture to its module.

Owns: which class computes which architecture. Does not know: weights.
"""

import torch

from minserve.models.causal_lm import CausalLM
from minserve.models.config import ModelConfig
from minserve.models.llama import LlamaForCausalLM
from minserve.models.qwen3 import Qwen3ForCausalLM


def build_model(config: ModelConfig) -> CausalLM:
    """The model on "meta": its parameters have shapes only, until weights are loaded."""
    with torch.device("meta"):
        return _class_of(config.architecture)(config).eval()


def _class_of(architecture: str) -> type[LlamaForCausalLM] | type[Qwen3ForCausalLM]:
    match architecture:
        case "LlamaForCausalLM":
            return LlamaForCausalLM
        case "Qwen3ForCausalLM":
            return Qwen3ForCausalLM
    raise AssertionError(f"the configuration let {architecture} through")
