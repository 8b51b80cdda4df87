"""The engine in a script, without a server.

    from minserve import LLM
    llm = LLM()
    print(llm.generate("The capital of France is", max_tokens=8)[0].text)

Owns: the engine's loop for a list of prompts. Does not know: HTTP, processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minserve.config import EngineConfig
from minserve.engine.build import build_engine
from minserve.engine.limits import refuse_sparse
from minserve.errors import ConfigError, RequestError, field_fault
from minserve.protocol import Ready, SamplingParams, SparseParams, SparseUsage, Submit, TokenLogprobs
from minserve.text.chat import ChatTemplate
from minserve.text.detokenizer import Detokenizer
from minserve.text.output import EndReason, Output, Piece
from minserve.text.tokenizer import Tokenizer
from minserve.weights.default_model import ensure_default_model, find_draft
from minserve.weights.hub import resolve_model

Prompt = str | Sequence[int]
Sparse = SparseParams | Mapping[str, Any]


@dataclass(slots=True)
class Completion:
    """What became of one prompt. token_ids include an end token; text does not, nor a stop string.

    logprobs: one entry for each of token_ids, if asked for. prompt_logprobs: one a prompt token, None for the first.
    draft_tokens, accepted_tokens: drafts that were verified for it, and those that were right.
    stop_reason: the stop string or the requested stop token that ended it, None for the model's own end.
    sparse: what its working set did, if it was sparse.
    """

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    sparse: SparseUsage | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def add(self, piece: Piece, output: Output) -> None:
        """Take in the next piece of its text, which output has made."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *piece.logprobs]
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens, self.cached_host_tokens = output.cached_tokens, output.cached_host_tokens
        self.draft_tokens, self.accepted_tokens = output.draft_tokens, output.accepted_tokens
        self.sparse = output.sparse
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class LLM:
    """A model in this process.

    model: a folder, a .gguf file or a hub name; None: the embedded default. draft: a folder or hub name of an EAGLE-3
    head, or "none"; None: the embedded default's own with that model, and none with others. engine: fields of
    EngineConfig, such as max_model_len or kv_cache_memory. Raises ConfigError if the model cannot be served.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        revision: str | None = None,
        draft: str | None = None,
        chat_template: str | None = None,
        **engine: Any,
    ) -> None:
        if model is None and revision is not None:
            raise ConfigError("revision is one of a model's, and no model is given")
        if model is None:
            folder = ensure_default_model()
        else:
            folder = resolve_model(model, revision=revision, need_weights=engine.get("load_format") != "dummy")
        self.tokenizer = Tokenizer.from_folder(folder)
        self.chat_template = ChatTemplate.from_folder(folder, chat_template)
        of_model = {
            "model_path": str(folder),
            "eos_token_ids": self.tokenizer.eos_token_ids,
            "token_id_ranges": self.tokenizer.token_id_ranges,
        }
        draft_folder = find_draft(draft, model)
        if draft_folder is not None:
            of_model["draft_path"] = str(draft_folder)
        config = EngineConfig.checked(**(of_model | engine))
        self.engine = build_engine(config)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        sparse: Sparse | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete each prompt: text, or token ids. All run in one batch.

        params, or options, which are fields of SamplingParams; the default is greedy, 16 tokens. stop: strings that end
        a text. sparse: what it asks of its working set, by the fields of SparseParams. Raises RequestError if a prompt
        or an option cannot be served; then nothing is. Raises EngineError if the engine fails on the way.
        """
        params = _checked_params(params or SamplingParams(max_tokens=16, temperature=0.0), options)
        batch = _as_list(prompts)
        ids = [self.tokenizer.encode(p, add_special_tokens=True) if isinstance(p, str) else list(p) for p in batch]
        return self._run(ids, params, stop, sparse)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        sparse: Sparse | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Completion:
        """The model's answer to a conversation. Without params and max_tokens it may fill the context.

        messages: as OpenAI's, with "role" and "content". template_kwargs: what the chat template takes besides them.
        Raises as `generate` does.
        """
        if not all(isinstance(message, Mapping) for message in messages):
            raise RequestError('messages must be a list of {"role": ..., "content": ...}', param="messages")
        text = self.chat_template.render(messages, template_kwargs=template_kwargs or {})
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        rest = max(1, self.engine.info.max_model_len - len(ids))
        params = _checked_params(params or SamplingParams(max_tokens=rest, temperature=0.0), options)
        return self._run([ids], params, stop, sparse)[0]

    def _run(
        self, prompts: list[list[int]], params: SamplingParams, stop: str | Sequence[str], sparse: Sparse | None
    ) -> list[Completion]:
        stop_strings = _checked_stop(stop)
        checked_sparse = None if sparse is None else _checked_sparse(sparse, self.engine.info)
        running: dict[str, Output] = {}
        completions = [Completion(prompt_token_ids=ids) for ids in prompts]
        try:
            for index, ids in enumerate(prompts):
                self._num_requests += 1
                request_id = f"llm-{self._num_requests}"
                detokenizer = Detokenizer(self.tokenizer, ids, stop=stop_strings, min_tokens=params.min_tokens)
                submit = Submit(request_id=request_id, prompt_token_ids=ids, params=params, sparse=checked_sparse)
                self.engine.submit(submit)
                running[request_id] = Output(index, params, detokenizer)
            while running:
                for delta in self.engine.step().deltas:
                    if delta.request_id in running:
                        output = running[delta.request_id]
                        completion = completions[output.index]
                        completion.add(output.take(delta), output)
                        if completion.finish_reason is not None:
                            del running[delta.request_id]
                            self.engine.abort(delta.request_id)  # a stop string ends a text before its request
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        return completions


def _checked_params(params: SamplingParams, options: Mapping[str, Any]) -> SamplingParams:
    """params with options in their places. Raises RequestError for what is unknown or out of its bounds."""
    try:
        return msgspec.convert({**msgspec.structs.asdict(params), **options}, SamplingParams)
    except msgspec.ValidationError as error:
        name, what = field_fault(error, SamplingParams)
        raise RequestError(f"{name}: {what}", param=name) from None


def _checked_sparse(sparse: Sparse, info: Ready) -> SparseParams:
    """Raises RequestError for what is unknown, out of its bounds, or not to be had of this engine."""
    given = sparse if isinstance(sparse, Mapping) else msgspec.structs.asdict(sparse)
    try:
        checked = msgspec.convert(given, SparseParams)
    except msgspec.ValidationError as error:
        name, what = field_fault(error, SparseParams)
        raise RequestError(f"sparse.{name}: {what}", param=f"sparse.{name}") from None
    refuse_sparse(checked, info)
    return checked


def _checked_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(item, str) and item for item in strings):
        raise RequestError(f"stop must be strings that are not empty, got {stop!r}", param="stop")
    return strings


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
