"""The gated activation of Llama's MLP: silu(gate) * up, with silu(g) = g / (1 + exp(-g)) (SwiGLU, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 * size], gate first, as one projection writes it. Returns [rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
