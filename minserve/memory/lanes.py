"""The device tables of running requests, one row a lane: fixed in size, updated in place.

Owns: page tables, last tokens and sampling state on the device, and the free list of lanes.
Does not know: who runs in which lane or why; the scheduler's plan says what to write.

A step is given lane ids and reads everything else here, so a request that leaves moves nothing, and the token that
step t samples is read by step t + 1 from `last_token` without passing through the host.
"""

from collections.abc import Sequence

import torch

from minserve.engine.plan import LaneSetup, StepPlan
from minserve.protocol import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS


class Lanes:
    """Tables for `num_lanes` running requests.

    page_table: [lanes, max_blocks] int32     page of each block
    last_token: [lanes] int64                 the newest token of the lane, the input of its next row
    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: [lanes] float32
    top_k, min_position: [lanes] int64        min_position: before it no end token may be sampled
    seed: [lanes, 2] int64                    the two 32-bit halves of the request's seed
    end_ids: [lanes, MAX_STOP_TOKEN_IDS] int64, bias_ids: [lanes, MAX_LOGIT_BIAS] int64; -1 where unused
    bias: [lanes, MAX_LOGIT_BIAS] float32
    prompt_seen: [lanes, vocab] bool, output_counts: [lanes, vocab] int32; made when a request first has a penalty
    """

    def __init__(self, num_lanes: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.num_lanes = num_lanes
        self.device = device
        self._vocab_size = vocab_size

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(num_lanes, *shape, dtype=torch.float32, device=device)

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(num_lanes, *shape, dtype=dtype, device=device)

        self.page_table = ints(max_blocks, dtype=torch.int32)
        self.last_token = ints()
        self.temperature, self.top_p, self.min_p = floats(), floats(), floats()
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = floats(), floats(), floats()
        self.top_k, self.min_position, self.seed = ints(), ints(), ints(2)
        self.end_ids = ints(MAX_STOP_TOKEN_IDS) - 1
        self.bias_ids, self.bias = ints(MAX_LOGIT_BIAS) - 1, floats(MAX_LOGIT_BIAS)
        self.prompt_seen: torch.Tensor | None = None
        self.output_counts: torch.Tensor | None = None

    def prepare(self, plan: StepPlan) -> None:
        """Write what the plan changes: lanes with a new request, and pages added to tables."""
        for setup in plan.setups:
            self._set_up(setup)
        for lane, block, pages in plan.new_pages:
            self.page_table[lane, block : block + len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def _set_up(self, setup: LaneSetup) -> None:
        lane, params = setup.lane, setup.params
        self.last_token[lane] = setup.last_token
        self.temperature[lane] = params.temperature
        self.top_p[lane], self.min_p[lane], self.top_k[lane] = params.top_p, params.min_p, params.top_k
        self.repetition_penalty[lane] = params.repetition_penalty
        self.presence_penalty[lane] = params.presence_penalty
        self.frequency_penalty[lane] = params.frequency_penalty
        self.seed[lane, 0], self.seed[lane, 1] = params.seed & 0xFFFFFFFF, (params.seed >> 32) & 0xFFFFFFFF
        self.min_position[lane] = setup.num_prompt_tokens + params.min_tokens
        _fill(self.end_ids[lane], setup.end_token_ids, -1)
        _fill(self.bias_ids[lane], list(params.logit_bias), -1)
        _fill(self.bias[lane], list(params.logit_bias.values()), 0.0)
        if setup.penalized:
            self._set_up_counts(setup)

    def _set_up_counts(self, setup: LaneSetup) -> None:
        if self.prompt_seen is None or self.output_counts is None:
            shape = (self.num_lanes, self._vocab_size)
            self.prompt_seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        token_ids = torch.tensor(setup.token_ids, dtype=torch.int64, device=self.device)
        prompt, output = token_ids[: setup.num_prompt_tokens], token_ids[setup.num_prompt_tokens :]
        self.prompt_seen[setup.lane].zero_()[prompt] = True
        counts = self.output_counts[setup.lane].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def _fill(row: torch.Tensor, values: Sequence[float], rest: float) -> None:
    row.fill_(rest)
    if values:
        row[: len(values)] = torch.tensor(values, dtype=row.dtype)
