"""Writes of some entries and not of others, for torch references: no shape depends on which, and the host waits for
nothing, so that they may stand in a CUDA graph.

An entry that is not to be written repeats the write of the first one that is. If there is none at all, they write to
one place what is there already.
"""

from typing import NamedTuple

import torch


class Valid(NamedTuple):
    """Which entries are written. pick: [n] int64, for each entry itself or the one it repeats; some: [1] bool, whether
    there is any to write."""

    pick: torch.Tensor
    some: torch.Tensor


def repeat_valid(valid: torch.Tensor) -> Valid:
    """valid: [n] bool, n > 0."""
    number = torch.arange(len(valid), device=valid.device)
    first = valid.to(torch.uint8).argmax(dim=0, keepdim=True)
    return Valid(torch.where(valid, number, first), valid.index_select(0, first))


def write_repeated(table: torch.Tensor, index: torch.Tensor, values: torch.Tensor | int, some: torch.Tensor) -> None:
    """table[index[i]] = values[i] for all i, if there is `some`. index: [n] int64, values: [n, ...] in the table's
    dtype or a number; both in the order of `pick`."""
    before = table.index_select(0, index[:1])
    table[index] = torch.where(some.view(-1, *[1] * (table.dim() - 1)), values, before).expand(
        len(index), *before[0].shape
    )


def write_where(table: torch.Tensor, index: torch.Tensor, values: torch.Tensor, valid: torch.Tensor) -> None:
    """table[index[i]] = values[i] where valid[i]. index: [n] int64, no number twice among the valid ones, anything
    else elsewhere; values: [n, ...] in the table's dtype; valid: [n] bool."""
    if len(index) == 0:
        return
    pick, some = repeat_valid(valid)
    write_repeated(table, torch.where(valid, index, 0)[pick], values[pick], some)
