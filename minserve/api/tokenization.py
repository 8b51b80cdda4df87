"""POST /tokenize and /detokenize, in vLLM's shapes. Tokens cost threads and memory as answers do, so whoever asks for
them stands in the same queue."""

from aiohttp import web

from minserve.api.body import read_json
from minserve.api.http import json_response
from minserve.api.prepare import encode_text, render_chat
from minserve.api.responses import DetokenizeResponse, TokenizeResponse
from minserve.api.sampling import check_token_ids
from minserve.api.schemas import DetokenizeRequest, TokenizeRequest, parse
from minserve.api.service import SERVICE
from minserve.errors import RequestError


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a prompt, or of a chat as the template writes it."""
    service = request.app[SERVICE]
    asked = parse(await read_json(request), TokenizeRequest)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if asked.messages is not None:
        special = bool(asked.add_special_tokens)
        text, param = await render_chat(service, asked, asked.messages), "messages"
    else:
        special = asked.add_special_tokens is not False
        text, param = asked.prompt or "", "prompt"
    ids = await encode_text(service, text, add_special_tokens=special, param=param)
    strings = [service.tokenizer.token_text(token_id) for token_id in ids] if asked.return_token_strs else None
    return json_response(TokenizeResponse(len(ids), service.engine.info.max_model_len, ids, strings))


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    service = request.app[SERVICE]
    asked = parse(await read_json(request), DetokenizeRequest)
    service.check_model(asked.model)
    longest = service.engine.info.max_model_len
    if len(asked.tokens) > longest:
        raise RequestError(f"tokens may hold at most {longest} ids, got {len(asked.tokens)}", param="tokens")
    check_token_ids(asked.tokens, service.engine.info.vocab_size, "tokens")
    text = await service.off_loop(
        len(asked.tokens), lambda: service.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    )
    return json_response(DetokenizeResponse(text))
