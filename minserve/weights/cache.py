"""The user's cache folder, and folders in it that are built once and never seen half made.

Owns: where the cache is, the lock that lets one process build while others wait, and the rename that publishes.
Does not know: what is built.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from minserve.errors import ConfigError

_logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """$XDG_CACHE_HOME/minserve, or ~/.cache/minserve."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative XDG_CACHE_HOME is to be ignored, says the XDG specification.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "minserve"


def built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, after `build` has filled it if it was not there.

    `build` is given an empty folder beside it, which is renamed when complete and removed when `build` raises.
    Raises ConfigError when the disk refuses, and whatever `build` raises.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _build_and_publish(folder, build)
    except OSError as error:
        raise ConfigError(_disk_message(folder, error)) from error
    return folder


def _build_and_publish(folder: Path, build: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(f"{folder.name}.part")
    # We hold the lock, so what lies here belongs to a process that was killed.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        build(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock. The kernel drops it with the process, so a crash leaves nothing locked."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.info("waiting for another process that is making %s", path.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _disk_message(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {folder} could not be written; free some space, or set XDG_CACHE_HOME to another disk"
        )
    return f"{folder} could not be written: {error}; XDG_CACHE_HOME chooses another cache folder"
