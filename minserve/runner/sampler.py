"""From logits to tokens, in the lanes' own state.

Owns: the order of what is done to logits. Does not know: requests; the lanes' tables say what each needs.
"""

from collections.abc import Sequence

import torch

from minserve.kernels.accept_drafts import Limits, accept_drafts
from minserve.kernels.adjust_logits import adjust_logits, count_tokens
from minserve.kernels.sampling import draw
from minserve.memory.lanes import Lanes


class Sampler:
    """token_ids outside of token_id_ranges (all, if it is empty) are never sampled nor reported."""

    def __init__(self, lanes: Lanes, vocab_size: int, token_id_ranges: Sequence[tuple[int, int]]) -> None:
        self._lanes = lanes
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        for start, end in token_id_ranges or [(0, vocab_size)]:
            allowed[start:end] = True
        self._allowed = None if bool(allowed.all()) else allowed.to(lanes.device)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [rows, vocab] with what is no token at -inf."""
        logits = logits.float()
        return logits if self._allowed is None else logits.masked_fill(~self._allowed, -torch.inf)

    def sample(
        self, logits: torch.Tensor, lane_ids: torch.Tensor, *, adjusted: bool, limits: Limits | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows each lane's newest token, and each of its drafts if that is what followed: (tokens, counts).

        logits: [entries * rows, vocab], a lane's rows one after the other; lane_ids: [entries] int64, -1: padding;
        adjusted: some lane has penalties, bias or a least length; limits: see `accept_drafts`.
        tokens: [entries, rows] int64, of which the first counts [entries] are the text, also written to the lanes.
        """
        lanes = self._lanes
        if adjusted:
            logits = adjust_logits(logits, lane_ids, lanes.adjustments)
        tokens = draw(logits, lane_ids, lanes.sampling, self._allowed)
        counts = accept_drafts(tokens, lane_ids, lanes.drafts, lanes.last_token, lanes.num_tokens, limits)
        if adjusted:
            count_tokens(tokens, lane_ids, counts, lanes.output_counts, lanes.penalized)
        return tokens.view(len(lane_ids), -1), counts
