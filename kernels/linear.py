"""x W^T + b.

On a CPU one row is a product of a matrix and a vector, and torch has a quicker way for it than for a matrix of one row:
for bfloat16 on two cores of a Xeon with AMX, 1.4 ms and not 2.5 for the head of SmolLM2, 0.18 and not 0.26 for its MLP.
"""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Torch reference. x: [rows, in]; weight: [out, in]; bias: [out]. Returns [rows, out]."""
    if x.shape[0] != 1 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    row = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
    return row[None]
