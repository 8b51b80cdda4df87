"""What lies between the projection of q, k and v and attention, in one pass: norm, RoPE, and k and v into their pages.

    q[t, h]                          = turn_t(norm(qkv[t, h], q_weight))
    kv[page(t), h, 0, slot(t)]       = turn_t(norm(qkv[t, heads + h], k_weight))
    kv[page(t), h, 1, slot(t)]       = qkv[t, heads + kv_heads + h]

    norm(x, w)         = x / sqrt(mean(x^2) + eps) * w over each head (Qwen3), or x where a model has none (Llama)
    turn_t([x1, x2])   = [x1 cos a - x2 sin a, x2 cos a + x1 sin a] with token t's angles a: RoPE in the half-split
                         form of Hugging Face checkpoints (RoFormer, arXiv 2104.09864)

Both are computed in float32, and each is rounded once to qkv's dtype, as in transformers. Where working sets want to
know what some rows look for, their q is kept as well (keep_queries.py).
"""

import torch
import torch.nn.functional as F

from minserve.kernels.keep_queries import Keep, keep_queries
from minserve.kernels.lang import tl, triton
from minserve.kernels.rope import apply_rope

Norms = tuple[torch.Tensor, torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]

HEADS = 8
"""Heads a program: of head_dim 128, two warps load 16 bytes a thread of each half."""


def norm_rope_store(
    qkv: torch.Tensor,
    norms: Norms | None,
    eps: float,
    rope: Rope,
    kv: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor | None = None,
    keep: Keep | None = None,
) -> torch.Tensor:
    """Writes k and v to their places in `kv`; returns q: [tokens, heads, head_dim], contiguous, in `out` if given.

    qkv: [tokens, heads + 2 * kv_heads, head_dim], contiguous, as one projection writes it
    norms: the weights of q's and k's norm, [head_dim] each, in qkv's dtype; or None. eps: what is added to the mean
    rope: from kernels.rope.gather_rope: [cos, cos] and [-sin, sin], [tokens, 1, head_dim] float32 each
    kv: [pages, kv_heads, 2, 16, head_dim], one layer's pages, contiguous
    places: [tokens] int64, page * 16 + slot, no place twice; -1: nothing is stored for the token, and its row of q
        has no meaning.
    keep: whose q is also kept, and where; None: nobody's.
    """
    tokens, all_heads, head_dim = qkv.shape
    _, kv_heads, sides, _, kv_head_dim = kv.shape
    assert all_heads > 2 * kv_heads, (qkv.shape, kv.shape)
    assert (sides, kv_head_dim, kv.dtype) == (2, head_dim, qkv.dtype), (kv.shape, kv.dtype, qkv.shape, qkv.dtype)
    assert (places.shape, places.dtype) == ((tokens,), torch.int64), (places.shape, places.dtype)
    assert rope[0].shape == rope[1].shape == (tokens, 1, head_dim), (rope[0].shape, rope[1].shape)
    if keep is not None:
        keep.check(tokens, all_heads - 2 * kv_heads, head_dim, qkv.dtype)
    run = norm_rope_store_triton if qkv.is_cuda else norm_rope_store_reference
    return run(qkv, norms, eps, rope, kv, places, out, keep)


def norm_rope_store_reference(
    qkv: torch.Tensor,
    norms: Norms | None,
    eps: float,
    rope: Rope,
    kv: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor | None = None,
    keep: Keep | None = None,
) -> torch.Tensor:
    kv_heads = kv.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    if norms is None:
        # q and k lie side by side and are turned alike: one pass turns both.
        qk, v = torch.split_with_sizes(qkv, [heads + kv_heads, kv_heads], dim=1)
        q, k = torch.split_with_sizes(apply_rope(qk, *rope), [heads, kv_heads], dim=1)
    else:
        q, k, v = torch.split_with_sizes(qkv, [heads, kv_heads, kv_heads], dim=1)
        q, k = (
            apply_rope(F.rms_norm(x, weight.shape, weight, eps), *rope) for x, weight in zip((q, k), norms, strict=True)
        )
    _store(kv, places, k, v)
    q = q.contiguous() if out is None else out.copy_(q)
    if keep is not None:
        keep_queries(q, keep)
    return q


def _store(kv: torch.Tensor, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    block_size = kv.shape[3]
    pages: int | torch.Tensor
    slots: int | torch.Tensor
    if places.shape[0] == 1:
        # Numbers cost a third less than tensors of one number, on a CPU, where reading one waits for nothing.
        pages, slots = divmod(int(places), block_size)
        if pages < 0:
            return
    else:
        kept = places >= 0
        if not kept.all():
            places, k, v = places[kept], k[kept], v[kept]
        pages, slots = torch.div(places, block_size, rounding_mode="floor"), torch.remainder(places, block_size)
    kv[pages, :, 0, slots] = k
    kv[pages, :, 1, slots] = v


@triton.jit
def _load_turned(x, weight, eps, cos, sin, column, inside, normed: tl.constexpr, head_dim: tl.constexpr):
    """The two halves of some heads, normed and turned, in float32. x: where each value of their first halves lies."""
    low = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + head_dim // 2, mask=inside, other=0.0).to(tl.float32)
    if normed:
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / head_dim + eps)[:, None]
        in_half = column < head_dim // 2
        low_weight = tl.load(weight + column, mask=in_half, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + head_dim // 2 + column, mask=in_half, other=0.0).to(tl.float32)
        low = (low * scale * low_weight[None, :]).to(x.dtype.element_ty).to(tl.float32)
        high = (high * scale * high_weight[None, :]).to(x.dtype.element_ty).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _store_halves(x, low, high, inside, head_dim: tl.constexpr):
    """x: where each value of the first halves goes."""
    tl.store(x, low.to(x.dtype.element_ty), mask=inside)
    tl.store(x + head_dim // 2, high.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_rope_store_kernel(
    qkv, q_weight, k_weight, eps, cos_table, sin_table, kv, places, q, ahead, lanes, kept, rows,
    keeps: tl.constexpr, normed: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr,
    block_size: tl.constexpr, group_size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """One program for one token and some heads of q, or for one token and some heads of k and v.

    rows: of an entry. width: head_dim / 2, rounded up to a power of two.
    """
    q_groups = (heads + group_size - 1) // group_size
    groups = q_groups + (kv_heads + group_size - 1) // group_size
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    column = tl.arange(0, width)
    in_half = column < head_dim // 2
    angle = token * head_dim + column
    cos = tl.load(cos_table + angle, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_table + head_dim // 2 + angle, mask=in_half, other=0.0)[None, :]
    token_qkv = qkv + token * ((heads + 2 * kv_heads) * head_dim)
    if group < q_groups:
        q_head = group * group_size + tl.arange(0, group_size)
        q_inside = (q_head < heads)[:, None] & in_half[None, :]
        q_offset = q_head[:, None] * head_dim + column[None, :]
        if keeps:
            entry = token // rows
            lane = tl.load(lanes + entry)
            row_ahead = tl.load(ahead + entry)
        q_low, q_high = _load_turned(token_qkv + q_offset, q_weight, eps, cos, sin, column, q_inside, normed, head_dim)
        _store_halves(q + token * (heads * head_dim) + q_offset, q_low, q_high, q_inside, head_dim)
        if keeps:
            row = tl.where(lane >= 0, token - entry * rows, -1)
            to_kept = kept + lane * (2 * heads * head_dim) + q_offset
            is_ahead = (q_head < tl.where(row == row_ahead, heads, 0))[:, None] & in_half[None, :]
            _store_halves(to_kept, q_low, q_high, is_ahead, head_dim)
            is_normal = (q_head < tl.where(row == 0, heads, 0))[:, None] & in_half[None, :]
            _store_halves(to_kept + heads * head_dim, q_low, q_high, is_normal, head_dim)
    else:
        head = (group - q_groups) * group_size + tl.arange(0, group_size)
        inside = (head < kv_heads)[:, None] & in_half[None, :]
        k_from = token_qkv + heads * head_dim + head[:, None] * head_dim + column[None, :]
        k_low, k_high = _load_turned(k_from, k_weight, eps, cos, sin, column, inside, normed, head_dim)
        v_from = k_from + kv_heads * head_dim
        v_low = tl.load(v_from, mask=inside, other=0.0)
        v_high = tl.load(v_from + head_dim // 2, mask=inside, other=0.0)
        place = tl.load(places + token)
        # Only stores are masked by the place, so that no load waits for it.
        stored = (head < tl.where(place >= 0, kv_heads, 0))[:, None] & in_half[None, :]
        page_head = place // block_size * kv_heads + head
        slot = page_head * (2 * block_size) + place % block_size
        to_k = kv + slot[:, None] * head_dim + column[None, :]
        _store_halves(to_k, k_low, k_high, stored, head_dim)
        _store_halves(to_k + block_size * head_dim, v_low, v_high, stored, head_dim)


def norm_rope_store_triton(
    qkv: torch.Tensor,
    norms: Norms | None,
    eps: float,
    rope: Rope,
    kv: torch.Tensor,
    places: torch.Tensor,
    out: torch.Tensor | None = None,
    keep: Keep | None = None,
) -> torch.Tensor:
    tokens, all_heads, head_dim = qkv.shape
    _, kv_heads, _, block_size, _ = kv.shape
    heads = all_heads - 2 * kv_heads
    cos, sin = rope
    assert cos.dtype == sin.dtype == torch.float32, (cos.dtype, sin.dtype)
    q = qkv.new_empty(tokens, heads, head_dim) if out is None else out
    assert (q.shape, q.dtype) == ((tokens, heads, head_dim), qkv.dtype), (q.shape, q.dtype)
    assert all(tensor.is_contiguous() for tensor in (qkv, cos, sin, kv, places, q))
    q_weight, k_weight = norms or (qkv, qkv)
    if norms is not None:
        assert q_weight.shape == k_weight.shape == (head_dim,), (q_weight.shape, k_weight.shape)
        assert q_weight.dtype == k_weight.dtype == qkv.dtype, (q_weight.dtype, k_weight.dtype)
    ahead, lanes, kept = keep or (places, places, q)
    groups = triton.cdiv(heads, HEADS) + triton.cdiv(kv_heads, HEADS)
    _norm_rope_store_kernel[(tokens * groups,)](
        qkv, q_weight, k_weight, eps, cos, sin, kv, places, q, ahead, lanes, kept, tokens // max(len(lanes), 1),
        keep is not None, norms is not None, heads, kv_heads, head_dim, block_size, HEADS,
        triton.next_power_of_2(head_dim // 2), num_warps=2,
    )  # fmt: skip
    return q
