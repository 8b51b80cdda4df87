"""The small JSON files beside a tokenizer.

Owns: reading them with errors that name the file. Does not know: what is in them.
"""

from pathlib import Path
from typing import Any

import msgspec

from minserve.errors import ConfigError
from minserve.folder import file_in_folder


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file. Raises ConfigError if it holds anything else, or is a
    link out of its folder."""
    if not path.is_file():
        return {}
    file = file_in_folder(path.parent, path.name)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error


def read_text(path: Path) -> str:
    """The text of a file. Raises ConfigError if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def added_token_text(value: Any) -> str | None:
    """A special token in a configuration is its text, or an object that has it as "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
