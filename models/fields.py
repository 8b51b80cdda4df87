"""Typed reading of a JSON object's fields. Imports no torch.

Owns: the errors for a field that is absent, of the wrong type or out of range.
Does not know: what any field means.
"""

import json
from collections.abc import Mapping
from typing import Any

from minserve.errors import ConfigError


class Fields:
    """The fields of one object. A field that is null counts as absent; without a default it must be there.

    source: where the object comes from, for the errors ("…/config.json", "--rope-scaling").
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def any(self, name: str) -> Any:
        return self._values.get(name)

    def names(self) -> set[str]:
        return set(self._values)

    def error(self, name: str, allowed: str) -> ConfigError:
        """The error for a field whose value is not `allowed`."""
        if not self.has(name):
            return ConfigError(f"{self.source}: {name} is missing; it must be {allowed}")
        return ConfigError(f"{self.source}: {name} is {_describe(self.any(name))}; it must be {allowed}")

    def integer(self, name: str, default: int | None = None, *, maximum: int = 2**31 - 1) -> int:
        """A whole number from 1 to maximum."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise self.error(name, f"a whole number from 1 to {maximum}")
        return value

    def number(
        self, name: str, default: float | None = None, *, minimum: float = 1e-12, maximum: float = 1e12
    ) -> float:
        """A number from minimum to maximum."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        # Python compares whole numbers of any size with floats exactly, and NaN with nothing.
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise self.error(name, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of the allowed strings."""
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, "one of " + ", ".join(allowed))
        return value


def _describe(value: Any) -> str:
    """The value as JSON, cut to a length that fits an error line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
