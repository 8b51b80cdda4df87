"""Chats to prompts, in processes of their own.

Owns: what becomes of a chat that takes too long or too much.
Does not know: templates (chat), the limits of a process but for its time (lines), how one is replaced (processes).

A template is a program that came with a model, and what it does with a client's input is anybody's guess.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from minserve.errors import RequestError
from minserve.text.chat import ChatTemplate
from minserve.text.processes import NUM_PROCESSES, ProcessEndedError, Processes

logger = logging.getLogger("minserve")

MAX_CPU_S = 10.0
"""Processor time for one chat. A hundred thousand messages take two or three seconds on a slow core."""


class Renderer:
    """The chat templates of one model. render may be called from any event loop; close ends the processes."""

    def __init__(self, template: ChatTemplate, *, max_cpu_s: float = MAX_CPU_S) -> None:
        self.template = template
        self._max_cpu_s = max_cpu_s
        # All at once: to start one takes longer than a hundred chats, and would fall into the first burst.
        setup = {"templates": template.sources, "special_tokens": template.special_tokens, "max_cpu_s": max_cpu_s}
        self._processes = Processes("minserve.text.render_process", json.dumps(setup).encode(), ahead=NUM_PROCESSES)

    async def render(self, chat: Mapping[str, Any]) -> str:
        """The prompt of a chat, given as the arguments of ChatTemplate.render. Raises RequestError as that does, and
        for a chat that takes too long or too much.
        """
        try:
            answer = await self._processes.ask(json.dumps(chat).encode())
        except RecursionError:
            raise RequestError("the chat is nested too deeply", param="messages") from None
        except ProcessEndedError as error:
            logger.warning("a process has ended over a chat that it rendered, with code %d", error.code)
            raise RequestError(
                "the chat template cannot render this request: its process ended over it, which may take "
                f"{self._max_cpu_s:g} s of processor time",
                param="messages",
            ) from None
        if "text" not in answer:
            raise RequestError(answer["message"], param=answer["param"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the processes; what they were rendering fails."""
        self._processes.close()
