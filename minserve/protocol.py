"""The messages between the API process and the engine process: msgspec Structs, msgpack on the wire, never pickle.

Owns: what a request is on its way to the engine, and what comes back.
Does not know: sockets (engine.client, engine.process), text (the engine sees token ids only), HTTP.

Every `Submit` is answered by any number of `Delta`s, of which exactly the last one carries a `finish_reason`.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_MESSAGE_BYTES = 256 * 2**20
"""A longer frame is a bug or an attack: the reader refuses it."""

MAX_LOGIT_BIAS = 1024
MAX_DRAFT_TOKENS = 8
MAX_STOP_TOKEN_IDS = 128
"""Widths of the device tables. Of the tokens that end a text some are the model's, the rest a request may name."""

MAX_MODEL_END_TOKEN_IDS = 32
MAX_REQUEST_STOP_TOKEN_IDS = MAX_STOP_TOKEN_IDS - MAX_MODEL_END_TOKEN_IDS
MAX_LOGPROBS = 20

FinishReason = Literal["stop", "length", "abort", "error"]

# The bounds of sampling, said once: requests, generation_config.json and scripts are all held to them.
Temperature = Annotated[float, Meta(ge=0, le=100)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogitBias = Annotated[float, Meta(ge=-100, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen: complete, and checked where it is made. The engine trusts it.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off.
    seed keys the Gumbel noise together with the position, so that a text depends on its request alone.
    logprobs: how many alternatives to report for each generated token (0: the sampled token's own); None: none.
    prompt_logprobs: the same for each prompt token but the first.
    stop_token_ids end the text with reason "stop", as the model's own end tokens do unless ignore_eos.
    """

    max_tokens: Annotated[int, Meta(ge=1)]
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Temperature = 1.0
    top_p: PositiveShare = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, LogitBias], Meta(max_length=MAX_LOGIT_BIAS)] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_REQUEST_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, from the model's own distribution (before temperature and filters).

    logprob and rank belong to token_id; rank 1 is the most likely token. top: (token id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class SparseParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one request asks of its working set; None: as the server does.

    mode: never sparse, under pressure, or from its first decode step on. cap: blocks that a KV head of a layer takes in
    per step at most. verify_drafts: drafts that a step accepts at most.
    """

    mode: Literal["never", "pressure", "always"] | None = None
    lookahead: Literal["draft", "current"] | None = None
    verify_drafts: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    miss_policy: Literal["approximate", "retry"] | None = None
    fetch: Literal["fixed", "adaptive"] | None = None
    cap: Annotated[int, Meta(ge=1, le=4096)] | None = None


class SparseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a sparse request's working set did, in blocks of one KV head of one layer, over all of its steps.

    from_token: the first token whose KV was computed while it was sparse. steps: while it was; retries: of these, how
    many ran again. The others as in `Fetched`. bytes_fetched: from host memory into pages.
    """

    from_token: int
    steps: int
    retries: int
    hits: int
    misses: int
    cut_misses: int
    surprises: int
    asked: int
    bytes_fetched: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request. cache_salt separates the prefix caches of tenants that must not see each other's timing. grammar: what
    its text must fit (`Grammars`), tried by the sender; None: anything. sparse: None: as the server does."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    grammar: str | None = None
    sparse: SparseParams | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request. If it is still alive it ends with finish_reason "abort"; otherwise nothing happens."""

    request_id: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Show the working set of a request: `Seen` comes back."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Abort what is left, answer each request, and exit with 0."""


class Delta(msgspec.Struct, kw_only=True, tag="delta", omit_defaults=True):
    """New tokens of one request.

    logprobs has one entry for each of token_ids when they were asked for.
    prompt_logprobs comes once, with the first delta: one entry a prompt token, None for the first.
    cached_tokens: prompt tokens whose KV was found in the prefix cache (in the first delta and in the last);
    cached_host_tokens: those of them that were loaded from host memory.
    draft_tokens, accepted_tokens: drafts of this request that were verified so far, and those that were right.
    stop_token_id: which token ended the text, if one did (it is in token_ids too).
    error: the reason, with finish_reason "error".
    sparse: in the last delta of a request that was sparse.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    cached_host_tokens: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    error: str | None = None
    sparse: SparseUsage | None = None


class Stats(msgspec.Struct, kw_only=True):
    """Gauges as of now, and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    """How often the first draft was accepted, how often the second..."""
    num_sparse: int = 0
    num_demotions: int = 0
    sparse_steps: int = 0
    """Of all sparse requests, as the fields of `SparseUsage`."""
    sparse_retries: int = 0
    sparse_hits: int = 0
    sparse_misses: int = 0
    sparse_cut_misses: int = 0
    sparse_surprises: int = 0
    sparse_asked: int = 0
    bytes_fetched: int = 0
    bytes_stored: int = 0

    def note_drafts(self, num_drafts: int, accepted: Sequence[int]) -> None:
        """A step verified num_drafts drafts of some requests each, and accepted so many of them."""
        self.num_drafts += len(accepted) if num_drafts else 0
        self.num_draft_tokens += num_drafts * len(accepted)
        for count in accepted:
            for position in range(count):
                self.accepted_at[position] += 1


class WorkingSet(msgspec.Struct, frozen=True):
    """Which blocks of a sparse request are on the device, for each layer and KV head on its own.

    held, fetched: a bit for each block, the first in the lowest bit of a byte. A row for each KV head of each layer,
    the heads of a layer one after the other, and every row begins with a byte of its own. fetched: those of the blocks
    held that came from host memory in the last second.
    """

    request_id: str
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    held: bytes
    fetched: bytes


class Outputs(msgspec.Struct, tag="outputs"):
    """What one step produced. An empty one is the heartbeat of an idle engine."""

    deltas: list[Delta]
    stats: Stats


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """The answer to a `Look`. working_set: None: the request is not sparse, or not here."""

    request_id: str
    working_set: WorkingSet | None


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """The engine is making ready. phase: what it does ("weights", whose amounts are bytes; "CUDA graphs"...)."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine serves from now on; what it turned out to be.

    vocab_size is the width of the logits; token ids of prompts and options must be below it. draft: what was found of a
    draft head; empty: there is none. num_working_set_blocks: what a sparse request holds; 0: none can be sparse here.
    link_bytes_s: at which host blocks are fetched; 0: they are fetched over no link.
    """

    architecture: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    num_host_blocks: int
    kv_cache_bytes: int
    weights_bytes: int
    max_num_seqs: int
    draft: str = ""
    num_working_set_blocks: int = 0
    link_bytes_s: float = 0.0


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot start or go on; it exits after this. config: the user can mend it (exit code 2)."""

    message: str
    config: bool = False


ToEngine = Submit | Abort | Look | Shutdown
FromEngine = Outputs | Seen | Starting | Ready | Fatal
