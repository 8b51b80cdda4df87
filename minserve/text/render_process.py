"""A process that renders chats: one line of JSON in, one out, until its input ends.

Owns: what a template's answer is, for better or worse. Does not know: what is rendered (chat), who asks (renderer), the
limits (lines).

    python -m minserve.text.render_process

The first line holds the templates, every further one the arguments of ChatTemplate.render.
"""

import json
from functools import partial
from typing import Any

from minserve.errors import RequestError
from minserve.text.chat import ChatTemplate
from minserve.text.lines import Answer, serve_lines
from minserve.text.tokenizer import check_unicode


def _begin(first: dict[str, Any]) -> Answer:
    return partial(_answer, ChatTemplate(first["templates"], first["special_tokens"]))


def _answer(template: ChatTemplate, line: bytes) -> dict[str, Any]:
    try:
        asked: dict[str, Any] = json.loads(line)
        text = template.render(asked.pop("messages"), **asked)
        check_unicode(text, "messages")
        return {"text": text}
    except RequestError as error:
        return {"message": error.message, "param": error.param}
    except (MemoryError, RecursionError) as error:
        message = f"this request is too much for the chat template: {type(error).__name__}"
        return {"message": message, "param": "messages"}


if __name__ == "__main__":
    serve_lines(_begin)
