"""Reading a model folder: which file a name in it may mean, and its text or JSON.

Owns: the rule that nothing outside the folder is read, whatever an index, a file name or a link says.
Does not know: what the files mean.
"""

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from minserve.errors import WeightsError

_NUM_NAMES_SHOWN = 5


def file_in_folder(folder: Path, name: str) -> Path:
    """The regular file `name` of a model folder, links followed. Raises WeightsError if it is not there or not inside.

    name: relative, with "/" between parts; it may come from a file in the folder and is not trusted.
    A link may lead anywhere inside the folder, and in the hub's cache (models--org--name/snapshots/revision, whose
    entries link to models--org--name/blobs) anywhere inside that model's own part of the cache.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise WeightsError(f"{folder}: the file name {name!r} leads outside the model folder")
    try:
        root = folder.resolve(strict=True)
        path = root.joinpath(*parts).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise WeightsError(f"{folder}: there is no file {name!r}") from error
    if not path.is_relative_to(_boundary(root)):
        raise WeightsError(f"{folder}: {name!r} is a link to {path}, outside the model folder")
    if not path.is_file():
        raise WeightsError(f"{folder}: {name!r} is not a regular file")
    return path


def has_file(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of that name; a link that leads nowhere counts, and fails when it is read."""
    return os.path.lexists(folder / name)


def read_text(folder: Path, name: str) -> str:
    """The text of a file of the folder. Raises WeightsError if it is not there, not inside or not UTF-8."""
    path = file_in_folder(folder, name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"{folder / name} cannot be read: {error}") from error


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder. Raises WeightsError if it is not there or anything else."""
    try:
        return msgspec.json.decode(read_text(folder, name), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WeightsError(f"{folder / name} is not a JSON object: {error}") from error


def list_names(names: Iterable[str]) -> str:
    """Names for an error's line: the first of them, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NUM_NAMES_SHOWN])
    return shown if len(ordered) <= _NUM_NAMES_SHOWN else f"{shown} and {len(ordered) - _NUM_NAMES_SHOWN} more"


def _boundary(root: Path) -> Path:
    """The folder that links from a (resolved) model folder may not leave."""
    in_hub_cache = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    return root.parent.parent if in_hub_cache else root
