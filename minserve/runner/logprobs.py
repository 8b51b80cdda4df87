"""Log probabilities: computed on the device, read on the host when they have arrived.

Owns: what is reported of a token. Does not know: sampling; requests.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minserve.memory.transfer import to_host
from minserve.protocol import TokenLogprobs


class Logprobs(NamedTuple):
    """Of some rows. num_top: how many of the likeliest tokens each row reports.

    token_ids, own, ranks: [rows]; top_ids, top: [rows, max(num_top)]; ranks count from 1.
    """

    num_top: Sequence[int]
    token_ids: torch.Tensor
    own: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> "Logprobs":
        """The model's own log probabilities of token_ids, one a row, and of the likeliest tokens; on their way to the
        host.

        logits: [rows, vocab] float32, before temperature, bias and filters; token_ids: [rows] int64.
        """
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > own).sum(dim=-1) + 1
        top = logprobs.topk(max(num_top), dim=-1)
        return cls(num_top, *map(to_host, (token_ids, own[:, 0], ranks, top.indices, top.values)))

    def entries(self) -> list[TokenLogprobs]:
        """One for each row. What `of` was computed from must have ended."""
        columns = (tensor.tolist() for tensor in (self.token_ids, self.own, self.ranks, self.top_ids, self.top))
        return [
            TokenLogprobs(token_id, logprob, rank, list(zip(ids[:count], values[:count], strict=True)))
            for count, token_id, logprob, rank, ids, values in zip(self.num_top, *columns, strict=True)
        ]
