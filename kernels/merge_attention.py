"""One attention out of pieces: the same queries over disjoint sets of keys, each piece normalized by itself.

    lse    = log(sum over pieces i of exp(lse_i))
    out    = sum over pieces i of out_i exp(lse_i - lse)

where lse_i is the logarithm of the sum of exp(score) over the piece's keys (Flash-Decoding; arXiv 2501.01005, 2.2).

The kernel reads the pieces where attention has left them. To lay them side by side first would cost a prefill of 32K
tokens 1%.
"""

from collections.abc import Sequence

import torch

from minserve.kernels.lang import tl, triton

TOKENS = 16
"""Tokens a program, of one head: their lse lie side by side."""

MAX_PIECES = 12


def merge_attention(outs: Sequence[torch.Tensor], lses: torch.Tensor) -> torch.Tensor:
    """Returns [tokens, heads, head_dim] in the dtype of `outs`; summed in float32, rounded once.

    outs: at most MAX_PIECES of [tokens, heads, head_dim], each contiguous; lses: [pieces, heads, tokens] float32,
    contiguous, natural logarithms. Where an lse is -inf the piece saw no key, and what its out holds is not looked at;
    where all are, the result is 0.
    """
    tokens, heads, _ = outs[0].shape
    assert 1 <= len(outs) <= MAX_PIECES, len(outs)
    assert {out.shape for out in outs} == {outs[0].shape}, [out.shape for out in outs]
    assert lses.shape == (len(outs), heads, tokens), (outs[0].shape, lses.shape)
    assert lses.dtype == torch.float32, lses.dtype
    assert all(tensor.is_contiguous() for tensor in (*outs, lses))
    return merge_attention_triton(outs, lses) if lses.is_cuda else merge_attention_reference(outs, lses)


def merge_attention_reference(outs: Sequence[torch.Tensor], lses: torch.Tensor) -> torch.Tensor:
    # A softmax over nothing but -inf is NaN.
    weights = torch.where(lses == -torch.inf, 0.0, lses.softmax(dim=0)).transpose(1, 2)[..., None]
    pieces = torch.stack([*outs]).to(torch.float32)
    return pieces.masked_fill(weights == 0, 0.0).mul_(weights).sum(dim=0).to(outs[0].dtype)


@triton.jit
def _largest_lse(lse_at, pieces, stride, in_tokens, tile: tl.constexpr):
    largest = tl.full([tile], float("-inf"), tl.float32)
    for _ in range(pieces):
        largest = tl.maximum(largest, tl.load(lse_at, mask=in_tokens, other=float("-inf")))
        lse_at += stride
    return tl.where(largest == float("-inf"), 0.0, largest)  # -inf - -inf is NaN


@triton.jit
def _add(summed, total, piece, number: tl.constexpr, pieces, lse_at, stride, largest, in_tokens, offset, inside):
    """One piece more; past the last one nothing is loaded."""
    is_there = in_tokens & (tl.full(in_tokens.shape, number, tl.int32) < pieces)
    lse = tl.load(lse_at + number * stride, mask=is_there, other=float("-inf"))
    weight = tl.exp(lse - largest)
    values = tl.load(piece + offset, mask=inside & (weight > 0)[:, None], other=0.0)
    return summed + values.to(tl.float32) * weight[:, None], total + weight


@triton.jit(do_not_specialize=["pieces", "tokens"])
def _merge_attention_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11,
    lses, out, pieces, tokens,
    heads: tl.constexpr, head_dim: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """One program for `tile` tokens of one head; width: head_dim, rounded up to a power of two."""
    head = tl.program_id(0) % heads
    token = tl.program_id(0) // heads * tile + tl.arange(0, tile)
    column = tl.arange(0, width)
    in_tokens = token < tokens
    inside = in_tokens[:, None] & (column < head_dim)[None, :]
    stride = tokens.to(tl.int64) * heads
    lse_at = lses + head.to(tl.int64) * tokens + token
    largest = _largest_lse(lse_at, pieces, stride, in_tokens, tile)
    offset = (token.to(tl.int64) * heads + head)[:, None] * head_dim + column[None, :]
    total = tl.zeros([tile], tl.float32)
    summed = tl.zeros([tile, width], tl.float32)
    summed, total = _add(summed, total, p0, 0, pieces, lse_at, stride, largest, in_tokens, offset, inside)
    summed, total = _add(summed, total, p1, 1, pieces, lse_at, stride, largest, in_tokens, offset, inside)
    summed, total = _add(summed, total, p2, 2, pieces, lse_at, stride, largest, in_tokens, offset, inside)
    summed, total = _add(summed, total, p3, 3, pieces, lse_at, stride, largest, in_tokens, offset, inside)
    if pieces > 4:
        summed, total = _add(summed, total, p4, 4, pieces, lse_at, stride, largest, in_tokens, offset, inside)
        summed, total = _add(summed, total, p5, 5, pieces, lse_at, stride, largest, in_tokens, offset, inside)
        summed, total = _add(summed, total, p6, 6, pieces, lse_at, stride, largest, in_tokens, offset, inside)
        summed, total = _add(summed, total, p7, 7, pieces, lse_at, stride, largest, in_tokens, offset, inside)
    if pieces > 8:
        summed, total = _add(summed, total, p8, 8, pieces, lse_at, stride, largest, in_tokens, offset, inside)
        summed, total = _add(summed, total, p9, 9, pieces, lse_at, stride, largest, in_tokens, offset, inside)
        summed, total = _add(summed, total, p10, 10, pieces, lse_at, stride, largest, in_tokens, offset, inside)
        summed, total = _add(summed, total, p11, 11, pieces, lse_at, stride, largest, in_tokens, offset, inside)
    merged = summed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + offset, merged.to(out.dtype.element_ty), mask=inside)


def merge_attention_triton(outs: Sequence[torch.Tensor], lses: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = outs[0].shape
    out = torch.empty_like(outs[0])
    pieces = (*outs, *[outs[0]] * (MAX_PIECES - len(outs)))
    sizes = (len(outs), tokens, heads, head_dim, triton.next_power_of_2(head_dim), TOKENS)
    _merge_attention_kernel[(triton.cdiv(tokens, TOKENS) * heads,)](*pieces, lses, out, *sizes, num_warps=4)
    return out
