"""What a request must satisfy before it is queued: the engine's own check, whoever sends it. Imports no torch."""

import msgspec

from minserve.errors import RequestError
from minserve.protocol import MAX_LOGIT_BIAS, MAX_REQUEST_STOP_TOKEN_IDS, Ready, SparseParams, Submit


def refuse_impossible(submit: Submit, max_model_len: int, vocab_size: int) -> None:
    """Raise RequestError if a request could never be served alone."""
    num_prompt, params = len(submit.prompt_token_ids), submit.params
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", param="prompt")
    if params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens}; it must be at least 1", param="max_tokens")
    if num_prompt + params.max_tokens > max_model_len:
        raise RequestError(
            f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} exceed the context of "
            f"{max_model_len} tokens",
            param="max_tokens" if num_prompt < max_model_len else "prompt",
            code="context_length_exceeded",
        )
    for name, ids, most in (
        ("prompt", submit.prompt_token_ids, max_model_len),
        ("stop_token_ids", params.stop_token_ids, MAX_REQUEST_STOP_TOKEN_IDS),
        ("logit_bias", params.logit_bias, MAX_LOGIT_BIAS),
    ):
        if len(ids) > most:
            raise RequestError(f"{name} may hold at most {most} entries, got {len(ids)}", param=name)
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise RequestError(f"{name}: token ids must be in 0..{vocab_size - 1}", param=name)


def refuse_sparse(sparse: SparseParams | None, info: Ready) -> None:
    """Raise RequestError if a request asks of its working set what this engine has not.

    What holds without being asked for is no fault anywhere: never to be sparse, to accept no drafts.
    """
    for name, value in () if sparse is None else msgspec.structs.asdict(sparse).items():
        if value is None or (name, value) in (("mode", "never"), ("verify_drafts", 0)):
            continue
        if not info.num_working_set_blocks:
            why = 'no request is ever sparse on this server (see --sparse and --host-kv); allowed is {"mode": "never"}'
        elif not info.draft and (name, value) == ("lookahead", "draft"):
            why = 'this server has no draft head (--draft); allowed is "current"'
        elif not info.draft and name == "verify_drafts":
            why = "this server has no draft head (--draft); allowed is 0"
        else:
            continue
        raise RequestError(f"sparse.{name}: {why}", param=f"sparse.{name}", code="unsupported_parameter")
