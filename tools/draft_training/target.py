"""The target in training: a dense forward pass over whole texts, for its states.

Owns: loading it, and plain attention. Does not know: pages, chunks, the engine.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from minserve.kernels.rms_norm import rms_norm
from minserve.kernels.rope import apply_rope, gather_rope
from minserve.models.causal_lm import AuxStates, CausalLM, build_model
from minserve.models.config import ModelConfig
from minserve.models.layers import Norms
from minserve.weights.loader import load_weights

from .attention import BACKENDS


class States(NamedTuple):
    """aux: [texts * tokens, 3 * hidden], what comes into the head's layers; hidden: [texts * tokens, hidden], the last
    state, normed."""

    aux: torch.Tensor
    hidden: torch.Tensor


class DenseAttention:
    """Causal attention over texts of one length, side by side. As `Attend`."""

    def __init__(self, model: CausalLM, num_texts: int, num_tokens: int) -> None:
        self._config = model.config
        self._num_texts = num_texts
        positions = torch.arange(num_tokens, device=model.rope_table.device).repeat(num_texts)
        self._rope = gather_rope(model.rope_table, positions)

    def __call__(self, layer: int, qkv: torch.Tensor, norms: Norms | None) -> torch.Tensor:
        config = self._config
        q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if norms is not None:
            q, k = (rms_norm(x.contiguous(), weight, config.rms_norm_eps) for x, weight in zip((q, k), norms))
        q, k = apply_rope(q, *self._rope), apply_rope(k, *self._rope)
        q, k, v = (x.unflatten(0, (self._num_texts, -1)).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(BACKENDS):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class Target:
    """A frozen model and the layers that a head reads. model: on its device, with its RoPE table."""

    def __init__(self, model: CausalLM, aux_layers: tuple[int, ...]) -> None:
        self.model = model
        self.config = model.config
        self.aux_layers = aux_layers

    @classmethod
    def from_folder(
        cls, folder: Path, aux_layers: tuple[int, ...], device: torch.device, dtype: torch.dtype, num_positions: int
    ) -> "Target":
        model = build_model(ModelConfig.from_folder(folder))
        load_weights(model, folder, device=device, dtype=dtype)
        model.set_max_positions(num_positions)
        return cls(model, aux_layers)

    @property
    def lm_head(self) -> torch.Tensor:
        """[vocab, hidden]"""
        head = self.model.embed_tokens if self.model.lm_head is None else self.model.lm_head
        return head.weight.detach()

    @torch.no_grad()
    def states(self, token_ids: torch.Tensor) -> States:
        """token_ids: [texts, tokens] int64; what stands behind a text's end changes nothing before it."""
        num_texts, num_tokens = token_ids.shape
        size = len(self.aux_layers) * self.config.hidden_size
        aux = torch.empty(token_ids.numel(), size, dtype=self.lm_head.dtype, device=token_ids.device)
        attend = DenseAttention(self.model, num_texts, num_tokens)
        hidden = self.model(token_ids.flatten(), attend, AuxStates(self.aux_layers, aux))
        return States(aux, hidden)
