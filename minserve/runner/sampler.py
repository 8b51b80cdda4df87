"""From logits to tokens, in the lanes' own state.

Owns: the order of what is done to logits. Does not know: requests; the lanes' tables say what each needs.
"""

from collections.abc import Sequence

import torch

from minserve.kernels.adjust_logits import Adjustments, adjust_logits, count_tokens
from minserve.kernels.sampling import SamplingState, sample
from minserve.memory.lanes import Lanes


class Sampler:
    """token_ids outside of token_id_ranges (all, if it is empty) are never sampled nor reported."""

    def __init__(self, lanes: Lanes, vocab_size: int, token_id_ranges: Sequence[tuple[int, int]]) -> None:
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        for start, end in token_id_ranges or [(0, vocab_size)]:
            allowed[start:end] = True
        self._allowed = None if bool(allowed.all()) else allowed.to(lanes.device)
        self._penalized = lanes.penalized
        self._state = SamplingState(
            temperature=lanes.temperature,
            top_p=lanes.top_p,
            min_p=lanes.min_p,
            top_k=lanes.top_k,
            seed=lanes.seed,
            last_token=lanes.last_token,
            num_tokens=lanes.num_tokens,
        )
        self._adjustments = Adjustments(
            num_tokens=lanes.num_tokens,
            min_position=lanes.min_position,
            end_ids=lanes.end_ids,
            bias_ids=lanes.bias_ids,
            bias=lanes.bias,
            repetition=lanes.repetition_penalty,
            presence=lanes.presence_penalty,
            frequency=lanes.frequency_penalty,
            prompt_seen=lanes.prompt_seen,
            output_counts=lanes.output_counts,
        )

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [rows, vocab] with what is no token at -inf."""
        logits = logits.float()
        return logits if self._allowed is None else logits.masked_fill(~self._allowed, -torch.inf)

    def sample(self, logits: torch.Tensor, lane_ids: torch.Tensor, *, adjusted: bool) -> torch.Tensor:
        """The next token of each lane [rows] int64, also written to the lanes.

        logits: [rows, vocab]; lane_ids: [rows] int64, -1 for a row of nobody; adjusted: some lane has penalties, bias
        or a least length.
        """
        if adjusted:
            logits = adjust_logits(logits, lane_ids, self._adjustments)
        tokens = sample(logits, lane_ids, self._state, self._allowed)
        if adjusted:
            count_tokens(tokens, lane_ids, self._adjustments.output_counts, self._penalized)
        return tokens
