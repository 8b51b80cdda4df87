"""Messages to a prompt, by the model's own chat template.

Owns: which template counts, what of a request it may see, and that its output is transformers', byte for byte.
Does not know: token ids, HTTP, what the tools do.

Templates come with the model or from the operator, never from a client. They run in a sandbox (text.sandbox) that keeps
them from Python's internals, and may write MAX_PROMPT_CHARS. How long they run is not limited here: a server renders in
processes that it can do without (text.renderer).
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from minserve.errors import ConfigError, RequestError
from minserve.folder import has_file, read_text
from minserve.text.history import normalize_message, with_text_arguments
from minserve.text.sandbox import compile_template
from minserve.text.tokenizer import optional_json_object, read_special_tokens

_RESERVED_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
"""What a request may not set through chat_template_kwargs: it has fields of its own, or is not for clients."""

MAX_PROMPT_CHARS = 2**26
"""More than any context holds."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

_PROBE = '{"probe": 1}'


class ChatTemplate:
    """A model's chat templates, by name: "default", for some models also "tool_use". None at all for base models."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError for a template that is not Jinja."""
        self.sources = dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self._templates = {name: compile_template(name, source) for name, source in templates.items()}
        self._takes_text_arguments: dict[str, bool] = {}  # Found out when it first matters

    @classmethod
    def from_folder(cls, folder: Path, override: str | None = None) -> "ChatTemplate":
        """The templates of a model folder; override: the text of one that replaces them all.

        chat_template.jinja (and additional_chat_templates/NAME.jinja) beat "chat_template" in tokenizer_config.json,
        which is a template or a list of {"name", "template"}.
        """
        special_tokens = read_special_tokens(folder)
        if override is not None:
            return cls({"default": override}, special_tokens)
        return cls(_template_files(folder) or _configured_templates(folder), special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, with the BOS if the template writes one: encode it without adding special tokens.

        messages and tools: plain JSON values, as the client sent them.
        continue_final_message: the prompt ends with the exact text of the last message, for the model to go on with it.
        Raises RequestError, naming the field, for what cannot be rendered, and for whatever the template objects to.
        """
        kwargs = dict(template_kwargs or {})
        for name in _RESERVED_NAMES:
            if name in kwargs:
                raise RequestError(f"chat_template_kwargs may not set {name!r}", param=f"chat_template_kwargs.{name}")
        if not messages:
            raise RequestError("messages is empty; send at least one message", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message goes on with the last message and add_generation_prompt opens a new one: "
                "set one of them to false",
                param="continue_final_message",
            )
        name = self._choose(tools)
        chat = [normalize_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        if any("tool_calls" in message for message in chat) and self._wants_text_arguments(name):
            chat = [with_text_arguments(message) for message in chat]
        tag = final_text = ""
        if continue_final_message:
            final_text = _final_text(chat)
            tag = f"CONTINUE{secrets.token_hex(16)}"
            chat[-1]["content"] = final_text + tag
        context = {
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
            **kwargs,
        }
        prompt = _render(self._templates[name], context)
        return _cut_at_tag(prompt, tag, final_text) if continue_final_message else prompt

    def mentions(self, text: str) -> bool:
        """Whether any of the templates has this text in its source."""
        return any(text in source for source in self.sources.values())

    def _wants_text_arguments(self, name: str) -> bool:
        """Whether a template takes the arguments of calls as JSON text only.

        Most take an object and write it with `tojson`. DeepSeek's join it to a string, which an object cannot be, and
        some would write it as Python does.
        """
        if name not in self._takes_text_arguments:
            as_object, as_text = (self._probe(name, arguments) for arguments in (json.loads(_PROBE), _PROBE))
            fails = as_object is None or str(json.loads(_PROBE)) in as_object
            self._takes_text_arguments[name] = fails and as_text is not None and _PROBE in as_text
        return self._takes_text_arguments[name]

    def _probe(self, name: str, arguments: Any) -> str | None:
        """What a template makes of a call with these arguments; None if it objects."""
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        chat = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "content": "r"},
        ]
        context = {"messages": chat, "tools": None, "add_generation_prompt": True, **self.special_tokens}
        try:
            return _render(self._templates[name], context)
        except RequestError:
            return None

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if tools is not None and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        raise RequestError(
            "this model has no chat template, so it cannot chat: use /v1/completions, or start the server with "
            "--chat-template",
            param="messages",
        )


def _template_files(folder: Path) -> dict[str, str]:
    names = {path.stem: f"{path.parent.name}/{path.name}" for path in folder.glob("additional_chat_templates/*.jinja")}
    if has_file(folder, "chat_template.jinja"):
        names["default"] = "chat_template.jinja"
    return {name: read_text(folder, file_name) for name, file_name in sorted(names.items())}


def _configured_templates(folder: Path) -> dict[str, str]:
    value = optional_json_object(folder, "tokenizer_config.json").get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        templates = {"": None}
    if not all(isinstance(part, str) for pair in templates.items() for part in pair):
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of objects with the strings "
            "name and template"
        )
    return templates


def _render(template: jinja2.Template, context: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    room = MAX_PROMPT_CHARS
    try:
        for piece in template.generate(context):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                raise jinja2.TemplateError(f"it writes more than {MAX_PROMPT_CHARS} characters")
        return "".join(pieces)
    # Whatever a template raises, from raise_exception to a type error in one of its expressions, is its answer to this
    # request and no fault of the server.
    except Exception as error:
        # Its words may quote the request, whose strings may hold lone surrogates: those cannot be sent back. Nor may
        # the addresses that Python's default representations show.
        reason = _ADDRESS.sub("", str(error)).encode(errors="replace").decode() or type(error).__name__
        raise RequestError(f"the chat template cannot render this request: {reason}", param="messages") from error


def _final_text(chat: Sequence[Mapping[str, Any]]) -> str:
    content = chat[-1].get("content")
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs a last message with text content",
            param=f"messages[{len(chat) - 1}].content",
        )
    return content


def _cut_at_tag(prompt: str, tag: str, final_text: str) -> str:
    """The prompt up to the tag that followed the final text.

    Where the template trims that text, transformers drops its trailing white space too; here generation goes on after
    the exact text.
    """
    end = prompt.rfind(tag)
    # Templates may trim the beginning of a message; if they change more, the model would not continue what was sent.
    if end < 0 or not prompt[:end].endswith(final_text.lstrip()):
        raise RequestError(
            "continue_final_message: the chat template changes the last message's text, so it cannot be continued",
            param="continue_final_message",
        )
    return prompt[:end]
