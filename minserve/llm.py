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
from minserve.errors import EngineError
from minserve.protocol import Delta, FinishReason, SamplingParams, Submit, TokenLogprobs
from minserve.text.chat import ChatTemplate
from minserve.text.detokenizer import Detokenizer
from minserve.text.tokenizer import Tokenizer
from minserve.weights.default_model import ensure_default_model
from minserve.weights.hub import resolve_model

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """What became of one prompt. token_ids include an end token; text does not, nor a stop string."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM:
    """A model in this process.

    model: a folder, a .gguf file or a hub name; None: the embedded default. engine: fields of EngineConfig, such as
    max_model_len or kv_cache_memory. Raises ConfigError if the model cannot be served.
    """

    def __init__(
        self, model: str | None = None, *, revision: str | None = None, chat_template: str | None = None, **engine: Any
    ) -> None:
        folder = ensure_default_model() if model is None else resolve_model(model, revision=revision)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._chat_template = ChatTemplate.from_folder(folder, chat_template)
        config = msgspec.convert(
            {
                "model_path": str(folder),
                "eos_token_ids": self.tokenizer.eos_token_ids,
                "token_id_ranges": self.tokenizer.token_id_ranges,
                **engine,
            },
            EngineConfig,
        )
        self.engine = build_engine(config)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        **options: Any,
    ) -> list[Completion]:
        """Complete each prompt: text, or token ids. All run in one batch.

        params, or options, which are fields of SamplingParams; the default is greedy, 16 tokens. Raises RequestError if
        a prompt cannot be served; then none is.
        """
        params = msgspec.structs.replace(params or SamplingParams(max_tokens=16, temperature=0.0), **options)
        batch = _as_list(prompts)
        ids = [self.tokenizer.encode(p, add_special_tokens=True) if isinstance(p, str) else list(p) for p in batch]
        return self._run(ids, params, stop)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Completion:
        """The model's answer to a conversation. Without max_tokens it may fill the context."""
        text = self._chat_template.render(messages, template_kwargs=template_kwargs or {})
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        rest = max(1, self.engine.info.max_model_len - len(ids))
        params = msgspec.structs.replace(params or SamplingParams(max_tokens=rest, temperature=0.0), **options)
        return self._run([ids], params, stop)[0]

    def _run(self, prompts: list[list[int]], params: SamplingParams, stop: Sequence[str]) -> list[Completion]:
        running: dict[str, tuple[Completion, Detokenizer]] = {}
        completions = []
        try:
            for ids in prompts:
                self._num_requests += 1
                request_id = f"llm-{self._num_requests}"
                self.engine.submit(Submit(request_id=request_id, prompt_token_ids=ids, params=params))
                completions.append(Completion(prompt_token_ids=ids))
                detokenizer = Detokenizer(self.tokenizer, ids, stop=tuple(stop), min_tokens=params.min_tokens)
                running[request_id] = completions[-1], detokenizer
            while running:
                for delta in self.engine.step().deltas:
                    if delta.request_id in running and self._take(delta, *running[delta.request_id]):
                        del running[delta.request_id]
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        return completions

    def _take(self, delta: Delta, completion: Completion, detokenizer: Detokenizer) -> bool:
        """Add a delta to its completion. Whether that was the end."""
        if delta.finish_reason == "error":
            raise EngineError(delta.error or "the engine failed")
        text = detokenizer.push(delta.token_ids, ends_with_stop_token=delta.stop_token_id is not None)
        completion.text += text.text
        # A stop string may have ended the text before the last of these tokens.
        completion.token_ids = [*completion.token_ids, *delta.token_ids][: text.num_tokens]
        if delta.logprobs is not None:
            completion.logprobs = [*(completion.logprobs or []), *delta.logprobs][: text.num_tokens]
        completion.prompt_logprobs = delta.prompt_logprobs or completion.prompt_logprobs
        if delta.cached_tokens is not None:
            completion.cached_tokens = delta.cached_tokens
        if text.stop is not None:
            completion.finish_reason, completion.stop_reason = "stop", text.stop
            if delta.finish_reason is None:
                self.engine.abort(delta.request_id)
            return True
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_token_id
        if delta.finish_reason is not None:
            completion.text += detokenizer.finish()
            if detokenizer.stop is not None:
                completion.finish_reason, completion.stop_reason = "stop", detokenizer.stop
        return delta.finish_reason is not None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
