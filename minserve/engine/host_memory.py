"""How much host memory this process could still take: what the machine has free, within the limits of its containers.

Owns: reading /proc and control groups, of both versions. Does not know: what the memory is for.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Version(NamedTuple):
    """Where a version of control groups says what a group may take, what it has taken, and in its memory.stat, what of
    that are files that nobody has used lately. controller: what /proc/self/cgroup calls it."""

    root: str
    controller: str
    limit: str
    used: str
    files: str


_VERSIONS = (
    _Version("/sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file"),
    _Version(
        "/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
)


def available_bytes() -> int:
    """Host memory that this process could still take.

    Files that a container has read count as used there, until somebody needs their memory.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in lines_of("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return max(0, min([available, *(left for version in _VERSIONS for left in _left_in_groups(version))]))


def _left_in_groups(version: _Version) -> Iterator[int]:
    """Bytes that are left in each control group around this process that has a limit."""
    for folder in _groups(version):
        limit, used = lines_of(f"{folder}/{version.limit}"), lines_of(f"{folder}/{version.used}")
        if limit and used and limit[0] != "max":
            stat = dict(line.split(maxsplit=1) for line in lines_of(f"{folder}/memory.stat"))
            yield int(limit[0]) - int(used[0]) + int(stat.get(version.files, "0"))


def _groups(version: _Version) -> Iterator[str]:
    """Folders of the groups that this process is in, the outermost first. In a container, its own is the outermost, and
    /proc may name it by a path that exists outside only: nothing is read there."""
    yield version.root
    for line in lines_of("/proc/self/cgroup"):
        _, controllers, path = line.split(":", maxsplit=2)
        if version.controller in controllers.split(","):
            names = [name for name in path.split("/") if name]
            yield from (f"{version.root}/{'/'.join(names[:depth])}" for depth in range(1, len(names) + 1))


def lines_of(path: str) -> list[str]:
    """The lines of a file; none if there is no such file, or none for us."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
