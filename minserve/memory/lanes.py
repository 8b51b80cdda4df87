"""The device tables of running requests, one row a lane: fixed in size, updated in place.

Owns: page tables, last tokens and sampling state on the device, and the free list of lanes.
Does not know: who runs in which lane or why; the scheduler's plan says what to write.

A step is given lane ids and reads everything else here, so a request that leaves moves nothing, and the token that
step t samples is read by step t + 1 from `last_token` without passing through the host.
"""

from collections.abc import Sequence

import torch

from minserve.engine.plan import LaneSetup, StepPlan
from minserve.kernels.adjust_logits import Adjustments
from minserve.kernels.sampling import SamplingState
from minserve.memory.pages import zeros
from minserve.memory.transfer import to_device
from minserve.protocol import MAX_DRAFT_TOKENS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS


class Lanes:
    """Tables for `num_lanes` running requests.

    page_table: [lanes, max_blocks] int32     page of each block
    last_token: [lanes] int64                 the newest token of the lane, the input of its next row
    drafts: [lanes, MAX_DRAFT_TOKENS] int64   what may follow it; -1: nothing is proposed
    num_tokens: [lanes] int64                 how many it has, the newest too: where the next token will stand
    start, end: [lanes] int64                 the first position that is computed in the lane; no token stands at end
    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: [lanes] float32
    top_k, min_position: [lanes] int64        min_position: before it no end token may be sampled
    seed: [lanes, 2] int64                    the two 32-bit halves of the request's seed
    end_ids: [lanes, MAX_STOP_TOKEN_IDS] int64, bias_ids: [lanes, MAX_LOGIT_BIAS] int64; -1 where unused
    bias: [lanes, MAX_LOGIT_BIAS] float32
    penalized: [lanes] bool                   any of the three penalties is on
    constrained: [lanes] bool                 the lane has a grammar
    allowed: [lanes, 1 + MAX_DRAFT_TOKENS, ceil(vocab / 32)] int32
        the grammar's masks, for the next token and those behind drafts; of constrained lanes only
    prompt_seen: [lanes, vocab] bool, output_counts: [lanes, vocab] int32; kept for penalized lanes only
    """

    def __init__(self, num_lanes: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self.num_lanes = num_lanes
        self.device = device
        # A multiple of 4, so that every lane's row begins at 16 bytes: kernels are compiled for that.
        max_blocks = -(-max_blocks // 4) * 4
        self._max_blocks = max_blocks

        def table(dtype: torch.dtype, *shape: int, fill: int = 0) -> torch.Tensor:
            return torch.full((num_lanes, *shape), fill, dtype=dtype, device=device)

        floats, ints = torch.float32, torch.int64
        self.page_table = table(torch.int32, max_blocks)
        self.last_token, self.num_tokens = table(ints), table(ints)
        self.start, self.end = table(ints), table(ints)
        # One row more than there are lanes: what is proposed for padding goes there.
        self._drafts = torch.full((num_lanes + 1, MAX_DRAFT_TOKENS), -1, dtype=ints, device=device)
        self.drafts = self._drafts[:num_lanes]
        self.temperature, self.top_p, self.min_p = table(floats), table(floats), table(floats)
        self.repetition_penalty, self.presence_penalty = table(floats), table(floats)
        self.frequency_penalty = table(floats)
        self.top_k, self.min_position, self.seed = table(ints), table(ints), table(ints, 2)
        self.end_ids = table(ints, MAX_STOP_TOKEN_IDS, fill=-1)
        self.bias_ids, self.bias = table(ints, MAX_LOGIT_BIAS, fill=-1), table(floats, MAX_LOGIT_BIAS)
        self.penalized, self.constrained = table(torch.bool), table(torch.bool)
        self.allowed = zeros((num_lanes, 1 + MAX_DRAFT_TOKENS, -(-vocab_size // 32)), torch.int32, device.type)
        self.prompt_seen = zeros((num_lanes, vocab_size), torch.bool, device.type)
        self.output_counts = zeros((num_lanes, vocab_size), torch.int32, device.type)
        self.sampling = SamplingState(
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            top_k=self.top_k,
            seed=self.seed,
            num_tokens=self.num_tokens,
        )
        self.adjustments = Adjustments(
            num_tokens=self.num_tokens,
            min_position=self.min_position,
            drafts=self.drafts,
            end_ids=self.end_ids,
            bias_ids=self.bias_ids,
            bias=self.bias,
            repetition=self.repetition_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            prompt_seen=self.prompt_seen,
            output_counts=self.output_counts,
            constrained=self.constrained,
            allowed=self.allowed,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        tables = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return sum(table.nbytes for table in tables if table is not self.drafts)  # a view of another

    def set_drafts(self, lane_ids: torch.Tensor, drafts: Sequence[torch.Tensor]) -> None:
        """Propose drafts for some lanes, and no others. lane_ids: [entries] int64, -1: padding; drafts: one tensor
        [entries] int64 for each place behind the newest token."""
        rows = torch.full((len(lane_ids), MAX_DRAFT_TOKENS), -1, dtype=torch.int64, device=self.device)
        for number, tokens in enumerate(drafts):
            rows[:, number] = tokens
        self._drafts[torch.where(lane_ids < 0, self.num_lanes, lane_ids)] = rows

    def prepare(self, plan: StepPlan) -> None:
        """Write what the plan changes: lanes with a new request, and pages added to tables. The host waits for nothing:
        launched steps still read what was there."""
        if plan.setups:
            self._set_up(plan.setups)
        if plan.new_pages:
            added = [
                (lane * self._max_blocks + block, page)
                for lane, first, pages in plan.new_pages
                for block, page in enumerate(pages, first)
            ]
            at, values = to_device(added, torch.int64, self.device).T
            self.page_table.view(-1)[at] = values.to(torch.int32)
        if plan.masked:
            lanes = to_device(plan.masked, torch.int64, self.device)
            masks = to_device(plan.masks[:, :, : self.allowed.shape[2]], torch.int32, self.device)
            self.allowed[lanes, : masks.shape[1]] = masks

    def _set_up(self, setups: Sequence[LaneSetup]) -> None:
        device = self.device
        lanes = to_device([setup.lane for setup in setups], torch.int64, device)
        tables = [self.last_token, self.num_tokens, self.start, self.end, self.top_k, self.min_position, self.seed]
        _scatter(tables, lanes, to_device([_ints(setup) for setup in setups], torch.int64, device))
        tables = [self.temperature, self.top_p, self.min_p]
        tables += [self.repetition_penalty, self.presence_penalty, self.frequency_penalty]
        _scatter(tables, lanes, to_device([_floats(setup) for setup in setups], torch.float32, device))
        _scatter_lists(self.end_ids, lanes, [setup.end_token_ids for setup in setups], -1)
        _scatter_lists(self.bias_ids, lanes, [list(setup.params.logit_bias) for setup in setups], -1)
        _scatter_lists(self.bias, lanes, [list(setup.params.logit_bias.values()) for setup in setups], 0.0)
        self.drafts.index_fill_(0, lanes, -1)
        self.penalized[lanes] = to_device([setup.penalized for setup in setups], torch.bool, device)
        self.constrained[lanes] = to_device([setup.constrained for setup in setups], torch.bool, device)
        for setup in setups:
            if setup.penalized:
                self._set_up_counts(setup)

    def _set_up_counts(self, setup: LaneSetup) -> None:
        token_ids = to_device(setup.token_ids, torch.int64, self.device)
        prompt, output = token_ids[: setup.num_prompt_tokens], token_ids[setup.num_prompt_tokens :]
        self.prompt_seen[setup.lane].zero_().index_fill_(0, prompt, True)
        counts = self.output_counts[setup.lane].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def _ints(setup: LaneSetup) -> list[int]:
    """What `_set_up` takes apart again, in its order."""
    params = setup.params
    seed = [params.seed & 0xFFFFFFFF, (params.seed >> 32) & 0xFFFFFFFF]
    text = [setup.last_token, setup.num_tokens, setup.start, setup.end]
    return [*text, params.top_k, setup.num_prompt_tokens + params.min_tokens, *seed]


def _floats(setup: LaneSetup) -> list[float]:
    params = setup.params
    penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
    return [params.temperature, params.top_p, params.min_p, *penalties]


def _scatter(tables: Sequence[torch.Tensor], lanes: torch.Tensor, rows: torch.Tensor) -> None:
    """Row i holds the new values of lane lanes[i] in all tables, side by side."""
    widths = [1 if table.dim() == 1 else table.shape[1] for table in tables]
    for table, values in zip(tables, torch.split(rows, widths, dim=1), strict=True):
        table[lanes] = values if table.dim() > 1 else values[:, 0]


def _scatter_lists(table: torch.Tensor, lanes: torch.Tensor, lists: Sequence[Sequence[float]], rest: float) -> None:
    """Row lanes[i] of the table becomes lists[i], and `rest` behind it."""
    table.index_fill_(0, lanes, rest)
    width = max(map(len, lists))
    if width:
        rows = [[*values, *[rest] * (width - len(values))] for values in lists]
        table[:, :width][lanes] = to_device(rows, table.dtype, table.device)
