"""The Jinja environment of chat templates: transformers' dialect, in a sandbox.

Owns: what a template may call, and that it behaves as in transformers' apply_chat_template.
Does not know: messages, models.

The sandbox refuses Python's internals and changes to its inputs, and `range` is limited to 100,000. Time and memory are
limited by the process that it runs in (text.render_process), if at all.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from minserve.errors import ConfigError


def compile_template(name: str, source: str) -> jinja2.Template:
    """A template that is ready to render. Raises ConfigError, with the line, for one that is not Jinja."""
    # One environment a template: a template can reach its environment's globals, and so no other template's.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        # Nothing of a template is computed while it is compiled, where no limits hold: 'x' * 10**10 is a constant.
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template {name!r} is not valid, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ConfigError(f"the chat template {name!r} is nested too deeply") from error


@jinja2.pass_context
def _as_it_is(context: Context, value: Any) -> Any:
    """A finalizer that does nothing, but asks for what is not there before rendering."""
    return value


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training: here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: assignments inside it stay inside.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Dict:
    """`dict(...)` without the class behind it, whose attributes are a way out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)` whose attributes cannot shadow Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # As in Jinja: namespace(self=...) works.
        self, args = args[0], args[1:]
        attributes: dict[str, Any] = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not have the attribute {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `< > & '` for HTML, which is no part of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
