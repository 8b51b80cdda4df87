"""A tiny model on disk that answers, for the tests of the training of draft heads."""

import json

import tokenizers
import torch
from safetensors.torch import save_file

from minserve.models.causal_lm import build_model
from minserve.models.config import ModelConfig
from minserve.weights.loader import init_dummy_weights
from tests.api.tiny import write_model_folder
from tools.draft_training.answers import Text
from tools.draft_training.head import HeadShape, new_head
from tools.draft_training.target import Target

DRAFT_VOCAB = 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
AUX_LAYERS = (0, 1, 2)


def write_model(folder, scale=1.0, **changes):
    """scale: of the random weights; the vocabulary has larger ones, so that the model is sure of what it says."""
    folder.mkdir(exist_ok=True)
    write_model_folder(folder)
    vocab_size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab_size} | changes))
    model = build_model(ModelConfig.from_folder(folder))
    init_dummy_weights(model, device="cpu", dtype=torch.float32, seed=1)
    for name, tensor in model.checkpoint_tensors().items():
        if tensor.dim() == 2:
            tensor *= scale * (10.0 if "layers" not in name else 1.0)
    tensors = {name: part.contiguous() for name, part in model.checkpoint_tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_target(folder, aux_layers=AUX_LAYERS, **changes):
    write_model(folder, scale=5.0, **changes)
    return Target.from_folder(folder, aux_layers, torch.device("cpu"), torch.float32, 256)


def make_head(target, window=2048, intermediate_size=None, own_lm_head=False):
    """A new head; its ids are every other one of the target's first ones."""
    size = intermediate_size or target.config.intermediate_size
    config = HeadShape(DRAFT_VOCAB, window, target.aux_layers, size, own_lm_head).config(target.config)
    return new_head(config, target.model, 2 * torch.arange(DRAFT_VOCAB))


def disturb(head, seed=0):
    """Off its first values, so that every part of it matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return head


def random_texts(vocab_size, num_texts, length, start=8, kind="chat", seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size, (num_texts, length), generator=generator).tolist()
    return [Text(number, kind, False, start, ids) for number, ids in enumerate(rows)]
