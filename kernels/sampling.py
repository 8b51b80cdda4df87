"""Choosing the next token from logits.

    token = argmax over ids of  filtered(logits / temperature)[id] + g(seed, position, id)

g is Gumbel noise, so the argmax is a draw from softmax(filtered logits / temperature) (the Gumbel-max trick). It is a
function of (seed, position, id) alone: a counter-based generator, not a stream. So a seeded text does not depend on
who else is in the batch, on preemption, or on whether a draft proposed the token first.

The generator is two rounds of a 32-bit integer finaliser (constants of Wellons' "lowbias32") on the id, each keyed with
32 bits that four more rounds make of seed and position.
"""

import torch

_MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 on int64 tensors that hold 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise. seed: [rows, 2] int64, 32 bits each; position: [rows] int64. [rows, vocab] float32."""
    first = _mix(_mix(seed[:, 0] ^ 0x9E3779B9) ^ (position & _MASK))
    second = _mix((_mix(seed[:, 1] ^ 0x85EBCA6B) + first) & _MASK)
    ids = torch.arange(vocab_size, device=seed.device)
    bits = _mix((_mix(ids[None, :] ^ first[:, None]) + second[:, None]) & _MASK)
    # 23 bits and a half: the largest value is 1 - 2**-24, the largest float32 below 1, so the noise is finite.
    uniform = ((bits >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def apply_penalties(
    logits: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """repetition divides positive and multiplies negative logits of all seen tokens (CTRL, arXiv 1909.05858);
    presence and frequency are OpenAI's: subtracted once, and once per occurrence, for generated tokens.

    logits: [rows, vocab]; prompt_seen: the same, bool; output_counts: the same, int; the rest: [rows].
    """
    seen = prompt_seen | (output_counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    counts = output_counts.to(logits.dtype)
    return logits - presence[:, None] * (counts > 0) - frequency[:, None] * counts


def filter_logits(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep, in each row, the tokens of probability >= min_p x the largest, then the top_k best, then the smallest set
    of the best of these whose probability reaches top_p; the rest become -inf. The best token always stays.

    logits: [rows, vocab], divided by the temperature; top_k: [rows] int64, 0 is off; top_p, min_p: [rows].
    """
    best = logits.amax(dim=-1, keepdim=True)
    logits = logits.masked_fill(logits < best + min_p.clamp_min(1e-38).log()[:, None], -torch.inf)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(ranks[None, :] >= limit[:, None], -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    drop = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (ranks > 0)[None, :]
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
