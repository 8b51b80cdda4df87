"""Attention by its definition, for tests of models."""

import torch

from minserve.kernels.rms_norm import rms_norm
from minserve.kernels.rope import apply_rope, gather_rope


class DenseAttend:
    """Causal attention over one sequence, by its definition; keeps keys and values, so that passes may continue it."""

    def __init__(self, model):
        self.model = model
        self.kv = {}

    def __call__(self, layer, qkv, norms):
        config = self.model.config
        q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if norms is not None:
            q, k = (rms_norm(x, weight, config.rms_norm_eps) for x, weight in zip((q, k), norms, strict=True))
        keys, values = self.kv.get(layer, (k[:0], v[:0]))
        first = keys.shape[0]
        rope = gather_rope(self.model.rope_table, torch.arange(first, first + q.shape[0]))
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        keys, values = torch.cat((keys, k)), torch.cat((values, v))
        self.kv[layer] = keys, values
        group = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        hidden = torch.arange(keys.shape[0])[None, :] > torch.arange(first, keys.shape[0])[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
