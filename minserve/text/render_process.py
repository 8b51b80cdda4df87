"""A process that renders chats: one line of JSON in, one out, until its input ends.

Owns: the limits under which a template runs. Does not know: what is rendered (chat), who asks (renderer).

    python -m minserve.text.render_process

The first line holds the templates, every further one the arguments of ChatTemplate.render. A chat that takes more
processor time than its share ends the process, by the kernel's hand: no loop in Jinja's C or Python can be in the way.
More memory than MAX_MEMORY_BYTES is a MemoryError, and so an answer. JSON and not msgpack, because clients' numbers may
have any length.
"""

import json
import os
import resource
import signal
import sys
from typing import Any

from minserve.errors import RequestError
from minserve.text.chat import ChatTemplate
from minserve.text.tokenizer import check_unicode

MAX_MEMORY_BYTES = 2 * 2**30


def main() -> None:
    """Serve standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = json.loads(sys.stdin.buffer.readline() or "null")
    if first is None:
        return
    template = ChatTemplate(first["templates"], first["special_tokens"])
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):
            return  # The other side has gone in the middle of it.
        signal.setitimer(signal.ITIMER_PROF, first["max_cpu_s"])
        answer = _answer(template, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            sys.stdout.buffer.write(answer + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # There is nobody to tell.


def _answer(template: ChatTemplate, line: bytes) -> bytes:
    try:
        asked: dict[str, Any] = json.loads(line)
        text = template.render(asked.pop("messages"), **asked)
        check_unicode(text, "messages")
        return json.dumps({"text": text}).encode()
    except RequestError as error:
        return json.dumps({"message": error.message, "param": error.param}).encode()
    except (MemoryError, RecursionError) as error:
        message = f"this request is too much for the chat template: {type(error).__name__}"
        return json.dumps({"message": message, "param": "messages"}).encode()


if __name__ == "__main__":
    main()
