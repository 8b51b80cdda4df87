"""How many of a step's tokens count: those drawn after drafts that were right.

    count = 1 + number of leading j < R - 1 with tokens[e, j] == drafts[lane, j]
    last_token[lane] = tokens[e, count - 1]          num_tokens[lane] += count

Of a sparse lane fewer may count, or none at all, when the row has to run again.

An entry has R rows: its lane's last token, and R - 1 drafts. tokens[e, j] is what the target drew in row j, which is
after the last token and the first j drafts. It is drawn as always (sampling.py): the argmax of what the target says,
plus noise that seed, position and id alone decide. A draft is accepted if it is that token.

So drafts choose how far a step gets, never what the text says. Row j counts only if each draft before it is the token
that the target drew there; then the row has seen the very text that a step of one row would have seen, and draws the
same token with the same noise. The text is that of a server without drafts, not just one of the same distribution (up
to how logits round in batches of other sizes). That drafts are often right is due to the noise too: the draft head adds
the same to its own logits, and two distributions that are close then mostly have the same argmax (drafter-invariant
speculative decoding by Gumbel coupling, arXiv 2408.07978).
"""

from typing import NamedTuple

import torch

from minserve.kernels.lang import tl, triton

_ENTRIES = 64  # a program


class Limits(NamedTuple):
    """again: [entries] bool, whose step has to run again: its lane stays as it is. sparse: [num_lanes] bool; of the
    drafts of such a lane num_verified may count: [num_lanes] int64."""

    again: torch.Tensor
    sparse: torch.Tensor
    num_verified: torch.Tensor

    def of(self, counts: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
        """What is left of counts, [entries] int64."""
        lane = lanes.clamp_min(0)
        limited = torch.where(self.sparse[lane], counts.minimum(1 + self.num_verified[lane]), counts)
        return limited.masked_fill(self.again, 0)


def accept_drafts(
    tokens: torch.Tensor,
    lanes: torch.Tensor,
    drafts: torch.Tensor,
    last_token: torch.Tensor,
    num_tokens: torch.Tensor,
    limits: Limits | None = None,
) -> torch.Tensor:
    """How many of each entry's tokens count, [entries] int64, from 1 to R; 0 for padding. Takes them into the lanes.

    tokens: [entries * R] int64, R - 1 <= max_drafts; lanes: [entries] int64, no lane twice, -1 for padding;
    drafts: [num_lanes, max_drafts] int64, -1 where there is none, which is never right;
    last_token, num_tokens: [num_lanes] int64, both written;
    limits: None: no lane is sparse.
    """
    (entries,) = lanes.shape
    num_lanes, max_drafts = drafts.shape
    assert tokens.shape == (entries * (len(tokens) // max(entries, 1)),), (tokens.shape, entries)
    assert entries <= len(tokens) <= entries * (1 + max_drafts), (len(tokens), entries, max_drafts)
    assert last_token.shape == num_tokens.shape == (num_lanes,)
    if limits is not None:
        again, sparse, num_verified = limits
        assert (again.shape, sparse.shape, num_verified.shape) == (lanes.shape, (num_lanes,), (num_lanes,)), again.shape
        assert (again.dtype, sparse.dtype) == (torch.bool, torch.bool), (again.dtype, sparse.dtype)
        assert all(tensor.is_contiguous() for tensor in (again, sparse))
    tensors = (tokens, lanes, drafts, last_token, num_tokens, lanes if limits is None else limits.num_verified)
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in tensors)
    accept = accept_drafts_triton if tokens.is_cuda and entries > 0 else accept_drafts_reference
    return accept(tokens, lanes, drafts, last_token, num_tokens, limits)


def accept_drafts_reference(
    tokens: torch.Tensor,
    lanes: torch.Tensor,
    drafts: torch.Tensor,
    last_token: torch.Tensor,
    num_tokens: torch.Tensor,
    limits: Limits | None = None,
) -> torch.Tensor:
    tokens = tokens.view(len(lanes), len(tokens) // max(len(lanes), 1))
    num_drafts = max(tokens.shape[1] - 1, 0)
    right = tokens[:, :num_drafts] == drafts[lanes.clamp_min(0), :num_drafts]
    counts = torch.where(lanes >= 0, 1 + right.cumprod(dim=1).sum(dim=1), 0)
    if limits is not None:
        counts = limits.of(counts, lanes)
    entries = (counts > 0).nonzero()[:, 0]
    own = lanes[entries]
    last_token[own] = tokens[entries, counts[entries] - 1]
    num_tokens[own] += counts[entries]
    return counts


@triton.jit(do_not_specialize=["entries", "num_drafts"])
def _accept_kernel(
    tokens, lanes, drafts, last_token, num_tokens, again, sparse, num_verified, counts, entries, num_drafts, max_drafts,
    tile: tl.constexpr, width: tl.constexpr, limited: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * tile + tl.arange(0, tile)
    lane = tl.load(lanes + entry, mask=entry < entries, other=-1)
    real = lane >= 0
    row = entry.to(tl.int64) * (num_drafts + 1)
    # All drafts at once, and not one after the other: what takes time here is to wait for memory.
    place = tl.arange(0, width)[None, :]
    used = real[:, None] & (place < num_drafts)
    token = tl.load(tokens + row[:, None] + place, mask=used, other=0)
    draft = tl.load(drafts + lane[:, None] * max_drafts + place, mask=used, other=0)
    # Where the first wrong one stands, or the end of them. Were there width of them, all right, that end is width.
    accepted = tl.min(tl.where(used & (token == draft), width, place), 1)
    count = tl.where(real, 1 + accepted, 0).to(tl.int64)
    if limited:
        is_sparse = tl.load(sparse + lane, mask=real, other=0) != 0
        verified = tl.load(num_verified + lane, mask=real, other=0)
        count = tl.where(is_sparse, tl.minimum(count, 1 + verified), count)
        count = tl.where(tl.load(again + entry, mask=real, other=0) != 0, 0, count)
    goes_on = count > 0
    last = tl.load(tokens + row + count - 1, mask=goes_on, other=0)
    tl.store(last_token + lane, last, mask=goes_on)
    tl.store(num_tokens + lane, tl.load(num_tokens + lane, mask=goes_on, other=0) + count, mask=goes_on)
    tl.store(counts + entry, count, mask=entry < entries)


def accept_drafts_triton(
    tokens: torch.Tensor,
    lanes: torch.Tensor,
    drafts: torch.Tensor,
    last_token: torch.Tensor,
    num_tokens: torch.Tensor,
    limits: Limits | None = None,
) -> torch.Tensor:
    entries, max_drafts = len(lanes), drafts.shape[1]
    counts = torch.empty_like(lanes)
    again, sparse, num_verified = limits or (lanes, lanes, lanes)
    _accept_kernel[(triton.cdiv(entries, _ENTRIES),)](
        tokens, lanes, drafts, last_token, num_tokens, again.view(torch.uint8), sparse.view(torch.uint8), num_verified,
        counts, entries, len(tokens) // entries - 1, max_drafts,
        tile=_ENTRIES, width=triton.next_power_of_2(max(max_drafts, 1)), limited=limits is not None, num_warps=4,
    )  # fmt: skip
    return counts
