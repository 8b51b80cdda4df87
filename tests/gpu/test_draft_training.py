"""A draft head learns on a GPU, in bfloat16, what it learns on a CPU in float32."""

from pathlib import Path

import pytest
import torch

from tests.unit.draft_training_model import AUX_LAYERS, make_head, random_texts, write_model
from tools.draft_training.examples import collate
from tools.draft_training.target import Target
from tools.draft_training.trainer import Recipe, Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def gradients(folder: Path, device: str, dtype: torch.dtype, num_tokens: int):
    """(loss, all gradients) of one batch, with a window that the texts are longer than."""
    target = Target.from_folder(folder, AUX_LAYERS, torch.device(device), dtype, num_tokens + 64)
    trainer = Trainer(target, make_head(target, window=1024), folder, Recipe(steps=1, unroll=4))
    texts = random_texts(target.config.vocab_size, 2, num_tokens)
    loss = trainer.loss(collate(texts, prompt_weight=0.5))
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.float().cpu().flatten() for p in trainer.head.parameters()])


@pytest.mark.parametrize("num_tokens", [200, 2600])
def test_gradients_are_those_of_the_cpu(tmp_path, num_tokens):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    write_model(tmp_path, scale=2.0, max_position_embeddings=4096, **sizes)
    loss, gradient = gradients(tmp_path, "cpu", torch.float32, num_tokens)
    gpu_loss, gpu_gradient = gradients(tmp_path, "cuda", torch.bfloat16, num_tokens)
    assert gpu_loss == pytest.approx(loss, rel=0.02)
    assert torch.cosine_similarity(gradient, gpu_gradient, dim=0) > 0.98
