"""How far the head's distribution is from the target's.

    loss = - sum over rows r of weight(r) sum over ids i of p(r, i) log softmax(logits(r))(i),  logits = hidden W^T

p is the target's distribution, restricted to the head's vocabulary and renormalised. Logits of all rows of a step would
take gigabytes, and several steps stand at once: gradients are taken where logits are made, some rows at a time, and
logits are dropped.
"""

from typing import Any

import torch
import torch.nn.functional as F

ROWS = 4096
"""Rows whose logits are there at once."""


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        lm_head: torch.Tensor,
        probabilities: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        lm_head_grad = torch.zeros_like(lm_head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for begin in range(0, hidden.shape[0], ROWS):
            part = slice(begin, begin + ROWS)
            logits = F.linear(hidden[part], lm_head).float()
            wanted = probabilities[rows[part]].float()
            weight = weights[part, None]
            normalizer = logits.logsumexp(dim=-1, keepdim=True)
            # p sums to one up to rounding, and its sum is what the normalizer is weighted with.
            mass = wanted.sum(dim=-1, keepdim=True)
            total += (weight * (mass * normalizer - (wanted * logits).sum(dim=-1, keepdim=True))).sum()
            grad = logits.sub_(normalizer).exp_().mul_(mass).sub_(wanted).mul_(weight).to(hidden.dtype)
            hidden_grad[part] = grad @ lm_head
            if lm_head_grad is not None:
                lm_head_grad += (grad.T @ hidden[part]).float()
        ctx.save_for_backward(hidden_grad, lm_head_grad)
        ctx.lm_head_dtype = lm_head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, lm_head_grad = ctx.saved_tensors
        of_head = None if lm_head_grad is None else (lm_head_grad * grads[0]).to(ctx.lm_head_dtype)
        return hidden_grad * grads[0].to(hidden_grad.dtype), of_head, None, None, None


def soft_cross_entropy(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    probabilities: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The sum of weighted losses. hidden: [n, size]; lm_head: [ids, size]; probabilities: [positions, ids]; rows: [n]
    int64, each row's position; weights: [n] float32."""
    loss: torch.Tensor = _SoftCrossEntropy.apply(hidden, lm_head, probabilities, rows, weights)
    return loss


@torch.no_grad()
def target_probabilities(hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """hidden: [positions, size], the target's, normed; lm_head: [ids, size], its rows of the head's ids. Returns
    [positions, ids] in their dtype."""
    out = hidden.new_empty(hidden.shape[0], lm_head.shape[0])
    for begin in range(0, hidden.shape[0], ROWS):
        out[begin : begin + ROWS] = F.linear(hidden[begin : begin + ROWS], lm_head).float().softmax(dim=-1)
    return out
