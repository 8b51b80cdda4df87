"""One attention out of pieces: the same queries over disjoint sets of keys, each piece normalized by itself.

    lse    = log(sum over pieces i of exp(lse_i))
    out    = sum over pieces i of out_i exp(lse_i - lse)

where lse_i is the logarithm of the sum of exp(score) over the piece's keys (Flash-Decoding; arXiv 2501.01005, 2.2).
"""

import torch

from minserve.kernels.lang import tl, triton

TOKENS = 16
"""Tokens a program, of one head: their lse lie side by side."""


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Returns [tokens, heads, head_dim] in the dtype of `outs`; summed in float32, rounded once.

    outs: [pieces, tokens, heads, head_dim], contiguous; lses: [pieces, heads, tokens] float32, contiguous, natural
    logarithms. Where an lse is -inf the piece saw no key, and what its `outs` holds is not looked at; where all are,
    the result is 0.
    """
    pieces, tokens, heads, _ = outs.shape
    assert lses.shape == (pieces, heads, tokens), (outs.shape, lses.shape)
    assert lses.dtype == torch.float32, lses.dtype
    assert all(tensor.is_contiguous() for tensor in (outs, lses))
    return merge_attention_triton(outs, lses) if outs.is_cuda else merge_attention_reference(outs, lses)


def merge_attention_reference(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    # A softmax over nothing but -inf is NaN.
    weights = torch.where(lses == -torch.inf, 0.0, lses.softmax(dim=0)).transpose(1, 2)[..., None]
    return outs.to(torch.float32).masked_fill(weights == 0, 0.0).mul_(weights).sum(dim=0).to(outs.dtype)


@triton.jit(do_not_specialize=["pieces", "tokens"])
def _merge_attention_kernel(
    outs,
    lses,
    out,
    pieces,
    tokens,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """One program for `tile` tokens of one head; width: head_dim, rounded up to a power of two."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * tile + tl.arange(0, tile)
    column = tl.arange(0, width)
    in_tokens = token < tokens
    inside = in_tokens[:, None] & (column < head_dim)[None, :]
    piece_lses = tokens.to(tl.int64) * heads
    first_lse = lses + head.to(tl.int64) * tokens + token

    lse_at = first_lse
    largest = tl.full([tile], float("-inf"), tl.float32)
    for _ in range(pieces):
        largest = tl.maximum(largest, tl.load(lse_at, mask=in_tokens, other=float("-inf")))
        lse_at += piece_lses
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf is NaN

    lse_at = first_lse
    offset = (token.to(tl.int64) * heads + head)[:, None] * head_dim + column[None, :]
    out_at = outs + offset
    total = tl.zeros([tile], tl.float32)
    summed = tl.zeros([tile, width], tl.float32)
    for _ in range(pieces):
        weight = tl.exp(tl.load(lse_at, mask=in_tokens, other=float("-inf")) - largest)
        values = tl.load(out_at, mask=inside & (weight > 0)[:, None], other=0.0)
        summed += values.to(tl.float32) * weight[:, None]
        total += weight
        lse_at += piece_lses
        out_at += piece_lses * head_dim
    merged = summed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + offset, merged.to(out.dtype.element_ty), mask=inside)


def merge_attention_triton(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    pieces, tokens, heads, head_dim = outs.shape
    out = torch.empty_like(outs[0])
    _merge_attention_kernel[(triton.cdiv(tokens, TOKENS) * heads,)](
        outs, lses, out, pieces, tokens, heads, head_dim, triton.next_power_of_2(head_dim), TOKENS, num_warps=4
    )
    return out
