"""One exception tree. Users' mistakes are typed here; our own bugs are `assert`s.

Owns: the exceptions that cross room boundaries and what an HTTP client is told of each.
Does not know: HTTP itself; `api` turns a `RequestError` into a response.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as shapes

# msgspec says: "Expected `int`, got `str` - at `$.n`", "Object missing required field `role` - at `$.messages[0]`".
_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_IN_MAPPING = "[...]"  # how msgspec spells the place of a mapping's value
_BOUND = re.compile(r"^Expected `(?P<kind>\w+)`(?P<length> of length)? (?P<sign>>=|<=|>|<) (?P<bound>\S+)$")
_FIELD_NAME = re.compile(r"(?:^|\.)(\w+)")
_SIGNS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_ITEMS = {"str": "characters", "array": "items", "object": "entries"}
_NAMED_FIELD = re.compile(r"^Object (contains|missing) (?P<what>unknown|required) field `(?P<name>.*)`$", re.DOTALL)


class MinserveError(Exception):
    """Base of everything that minserve raises on purpose."""


class ConfigError(MinserveError):
    """A flag, a configuration file or a model folder cannot be served. The command prints it and exits with 2."""


class WeightsError(ConfigError):
    """Model files are missing, left over, malformed or outside their folder."""


class RequestError(MinserveError):
    """A request cannot be served as it is: bad input, unknown model, no room.

    status: the HTTP status. param: the field at fault, if one is. code: a machine-readable word.
    """

    status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    status = 401
    error_type = "authentication_error"


class NotFoundError(RequestError):
    """An unknown route or model."""

    status = 404
    error_type = "not_found_error"


class OverloadedError(RequestError):
    """The server is full, draining or not ready: try again after `retry_after_s` seconds."""

    status = 503
    error_type = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: int = 1, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    """This client has as many requests running or waiting as one may have."""

    status = 429
    error_type = "rate_limit_error"


class EngineError(MinserveError):
    """A request that had been accepted could not be finished: the engine failed on it, died or froze."""


class EngineDeadError(EngineError):
    """The engine process is gone; nothing more will be served."""


def field_fault(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """(path of the field at fault, what is wrong with it); the path is empty if it is the whole value.

    kind: what the value was to be.
    """
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"]) if match else (str(error), "")
    if named := _NAMED_FIELD.search(what):
        return ".".join(filter(None, (path, named["name"]))), f"{named['what']} field"
    if what.startswith("Invalid enum value"):
        names = _FIELD_NAME.findall(path)
        what += f"; allowed: {', '.join(sorted(_choices(shapes.type_info(kind), names)))}"
    return path.removesuffix(_IN_MAPPING), _bound_in_words(what) or what[:1].lower() + what[1:]


def _choices(kind: shapes.Type, names: list[str]) -> Iterator[str]:
    """The values that a field may have, by the names on the path to it."""
    match kind:
        case shapes.UnionType():
            for one in kind.types:
                yield from _choices(one, names)
        case shapes.ListType() | shapes.VarTupleType():
            yield from _choices(kind.item_type, names)
        case shapes.DictType():
            yield from _choices(kind.value_type, names)
        case shapes.StructType() if names:
            for field in kind.fields:
                if field.encode_name == names[0]:
                    yield from _choices(field.type, names[1:])
        case shapes.LiteralType() if not names:
            yield from map(str, kind.values)


def _bound_in_words(what: str) -> str | None:
    """ "Expected `array` of length <= 16" as "must have at most 16 items"."""
    if (match := _BOUND.match(what)) is None:
        return None
    if match["length"] and (match["sign"], match["bound"]) == (">=", "1"):
        return "must not be empty"
    bound = f"{_SIGNS[match['sign']]} {match['bound'].removesuffix('.0')}"
    return f"must have {bound} {_ITEMS[match['kind']]}" if match["length"] else f"must be {bound}"
