"""From the engine's tokens to pieces of one text.

Owns: where a text, its token count and its logprobs end, and why.
Does not know: who wants the text (api, LLM), how an engine is asked for tokens.
"""

from typing import Literal

import msgspec

from minserve.errors import EngineError
from minserve.protocol import Delta, SamplingParams, SparseUsage, TokenLogprobs
from minserve.text.detokenizer import Detokenizer

EndReason = Literal["stop", "length"]


class Piece(msgspec.Struct, kw_only=True):
    """What one message of the engine added to one text.

    index: which of several texts. token_ids and logprobs end where the text ends, even if the engine had gone further;
    text may lag behind them, while it could still become a stop string. text_offsets: where each token begins in the
    generated text.
    finish_reason is set in exactly the last piece.
    stop_reason: the stop string or the requested stop token that ended the text, None for the model's own end.
    """

    index: int
    text: str
    token_ids: list[int]
    text_offsets: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None


class Output:
    """One text in the making. num_tokens counts what the client is charged for, stop tokens included. sparse: the
    last that the engine has said of its working set, if it was sparse."""

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.cached_tokens = 0
        self.cached_host_tokens = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.sparse: SparseUsage | None = None
        self._stop_token_ids = params.stop_token_ids
        self._detokenizer = detokenizer

    def take(self, delta: Delta) -> Piece:
        """What a delta adds. Raises EngineError if the engine could not finish the request.

        The piece may be the last one where the delta is not: then the engine's request is to be aborted.
        """
        if delta.finish_reason == "error":
            raise EngineError(delta.error or "the engine failed on this request")
        if delta.finish_reason == "abort":
            raise EngineError("the request was aborted: the engine is shutting down")
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
            self.cached_host_tokens = delta.cached_host_tokens or 0
        self.draft_tokens, self.accepted_tokens = delta.draft_tokens, delta.accepted_tokens
        self.sparse = delta.sparse or self.sparse
        ended_by_token = delta.finish_reason == "stop" and delta.stop_token_id is not None
        update = self._detokenizer.push(delta.token_ids, ends_with_stop_token=ended_by_token)
        num_kept = update.num_tokens - self.num_tokens
        piece = Piece(
            index=self.index,
            text=update.text,
            token_ids=delta.token_ids[:num_kept],
            text_offsets=update.offsets,
            logprobs=None if delta.logprobs is None else delta.logprobs[:num_kept],
            prompt_logprobs=delta.prompt_logprobs,
        )
        if update.stop is not None:
            piece.finish_reason, piece.stop_reason = "stop", update.stop
        elif delta.finish_reason is not None:
            piece.text += self._detokenizer.finish()
            piece.finish_reason = delta.finish_reason
            if self._detokenizer.stop is not None:  # completed by the last, cut character
                piece.finish_reason, piece.stop_reason = "stop", self._detokenizer.stop
            elif delta.stop_token_id in self._stop_token_ids:
                piece.stop_reason = delta.stop_token_id
        self.num_tokens = update.num_tokens
        return piece
