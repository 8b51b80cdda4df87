"""From logits to tokens, in the lanes' own state.

Owns: the order of what is done to logits, and the log probabilities that are reported.
Does not know: requests; a `Sample` says what its lane needs, so that a plain batch does no more than an argmax.
"""

from collections.abc import Sequence

import torch

from minserve.engine.plan import Sample
from minserve.kernels.sampling import apply_penalties, filter_logits, gumbel_noise
from minserve.memory.lanes import Lanes
from minserve.protocol import TokenLogprobs


class Sampler:
    """token_ids outside of token_id_ranges (all, if it is empty) are never sampled nor reported."""

    def __init__(self, lanes: Lanes, vocab_size: int, token_id_ranges: Sequence[tuple[int, int]]) -> None:
        self._lanes = lanes
        real = torch.zeros(vocab_size, dtype=torch.bool, device=lanes.device)
        for start, end in token_id_ranges or [(0, vocab_size)]:
            real[start:end] = True
        self._not_tokens = None if bool(real.all()) else ~real

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [rows, vocab] with what is no token at -inf."""
        logits = logits.float()
        return logits if self._not_tokens is None else logits.masked_fill(self._not_tokens, -torch.inf)

    def sample(self, logits: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
        """The next token of each row [rows] int64, also written to the lanes. logits: [rows, vocab], masked."""
        device = logits.device
        lanes = torch.tensor([sample.lane for sample in samples], device=device)
        positions = torch.tensor([sample.position for sample in samples], device=device)
        if any(sample.adjusted for sample in samples):
            logits = self._adjust(logits, lanes, positions, samples)
        if all(sample.greedy for sample in samples):
            tokens = logits.argmax(dim=-1)
        else:
            tokens = self._draw(logits, lanes, positions, any(sample.filtered for sample in samples))
        self._lanes.last_token[lanes] = tokens
        if any(sample.penalized for sample in samples):
            self._count(tokens, samples)
        return tokens

    def _draw(self, logits: torch.Tensor, lanes: torch.Tensor, positions: torch.Tensor, filtered: bool) -> torch.Tensor:
        state = self._lanes
        temperature = state.temperature[lanes]
        random = temperature > 0
        logits = logits / torch.where(random, temperature, 1.0)[:, None]
        if filtered:
            logits = filter_logits(logits, state.top_k[lanes], state.top_p[lanes], state.min_p[lanes])
        noise = gumbel_noise(state.seed[lanes], positions, logits.shape[-1])
        return (logits + noise * random[:, None]).argmax(dim=-1)

    def _adjust(
        self, logits: torch.Tensor, lanes: torch.Tensor, positions: torch.Tensor, samples: Sequence[Sample]
    ) -> torch.Tensor:
        state = self._lanes
        logits = _scatter_add(logits, state.bias_ids[lanes], state.bias[lanes])
        ends = state.end_ids[lanes]
        too_early = (positions < state.min_position[lanes])[:, None].expand_as(ends)
        logits = _scatter_add(
            logits, torch.where(too_early, ends, -1), torch.full_like(ends, -torch.inf, dtype=torch.float32)
        )
        rows = [row for row, sample in enumerate(samples) if sample.penalized]
        if rows:
            assert state.prompt_seen is not None
            assert state.output_counts is not None
            own = lanes[rows]
            logits[rows] = apply_penalties(
                logits[rows],
                state.prompt_seen[own],
                state.output_counts[own],
                state.repetition_penalty[own],
                state.presence_penalty[own],
                state.frequency_penalty[own],
            )
        return logits

    def _count(self, tokens: torch.Tensor, samples: Sequence[Sample]) -> None:
        counts = self._lanes.output_counts
        assert counts is not None
        rows = [row for row, sample in enumerate(samples) if sample.penalized]
        lanes = torch.tensor([samples[row].lane for row in rows], device=tokens.device)
        counts[lanes, tokens[rows]] += 1


def _scatter_add(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """logits with values[r, i] added at ids[r, i]; ids of -1 are none."""
    used = ids >= 0
    values = torch.where(used, values, 0.0)
    return logits.scatter_add(1, ids.clamp_min(0), values)


def report_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """The model's own log probabilities of token_ids, one a row, and of the num_top likeliest tokens.

    logits: [rows, vocab], before temperature, bias and filters; token_ids: [rows] int64.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top = logprobs.topk(num_top, dim=-1)
    columns = (token_ids.tolist(), own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    return [
        TokenLogprobs(token_id, logprob, rank, list(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(*columns, strict=True)
    ]
