"""Root mean square normalization, alone and behind a residual addition.

    rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w        over the last dimension (arXiv 1910.07467)

The mean and the product are taken in float32 and rounded once to x's dtype.
"""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size]; weight: [size], same dtype. Returns x's shape and dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, and normalize the sum: (rms_norm(x + residual), x + residual).

    x, residual: [rows, size], same dtype; neither is changed. weight: [size].
    """
    residual = residual + x
    return F.rms_norm(residual, weight.shape, weight, eps), residual
