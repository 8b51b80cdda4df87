"""Host memory that the GPU reads and writes by its address: anonymous, near the GPU, registered in pieces.

Owns: the mapping, and its registration with CUDA. Does not know: what is in it.

torch's pinned allocator rounds up to powers of two and pins at half the speed, and one registration fails near 512 GiB.
So memory is mapped as it is, touched by several threads on the cores of the GPU's NUMA node (the first to touch a page
decides where it is), and registered piece by piece, while others are still being touched. It is given back in pieces
too: a process that is killed with hundreds of GiB registered takes minutes to go.
"""

import contextlib
import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from minserve.errors import ConfigError

PIECE_BYTES = 4 * 2**30
"""Of a registration. Far below the 64 GiB that are known to work, so that there is progress to be seen."""

SLICE_BYTES = 256 * 2**20
"""Of a thread's turn."""

NUM_THREADS = 8
GIB = 2**30


class PinnedMemory:
    """num_bytes of it; progress: told of (GiB that are ready, GiB in all). Raises ConfigError if it cannot be had.

    unit_bytes: what is copied at once. No unit lies in two pieces: CUDA copies nothing that does.
    """

    def __init__(
        self, num_bytes: int, unit_bytes: int, device: torch.device, progress: Callable[[int, int], None]
    ) -> None:
        assert num_bytes > 0
        try:
            # Not shared, which is the default: that would be a file in memory, of small pages.
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(f"--host-kv: {num_bytes / GIB:.2f} GiB of memory cannot be mapped: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages does without
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pieces: list[int] = []
        # Memory must not go while it is registered: whatever is mapped there next could not be.
        self.close = weakref.finalize(self, _unregister, self.bytes, self._pieces)
        whole = math.lcm(unit_bytes, mmap.PAGESIZE)
        piece_bytes = max(PIECE_BYTES // whole, 1) * whole
        cpus = cpus_near(device)
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            pieces = [(begin, min(piece_bytes, num_bytes - begin)) for begin in range(0, num_bytes, piece_bytes)]
            touched = [
                [threads.submit(self._touch, at, min(SLICE_BYTES, begin + size - at), cpus)
                 for at in range(begin, begin + size, SLICE_BYTES)]
                for begin, size in pieces
            ]  # fmt: skip
            for (begin, size), slices in zip(pieces, touched, strict=True):
                for one in slices:
                    one.result()
                self._register(begin, size)
                progress(-(-(begin + size) // GIB), -(-num_bytes // GIB))

    def _touch(self, begin: int, size: int, cpus: frozenset[int]) -> None:
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)  # of this thread alone
        ctypes.memset(self.bytes.data_ptr() + begin, 0, size)  # lets other threads run

    def _register(self, begin: int, size: int) -> None:
        status = _cudart().cudaHostRegister(self.bytes.data_ptr() + begin, size, 0)
        if int(status) != 0:
            ready = begin / GIB
            self.close()
            raise ConfigError(
                f"--host-kv: CUDA refused to register host memory after {ready:.0f} of {len(self._map) / GIB:.0f} GiB "
                f"(error {int(status)}); ask for less, or raise the container's limit of locked memory"
            )
        self._pieces.append(begin)


def _unregister(memory: torch.Tensor, pieces: list[int]) -> None:
    """Piece by piece. Nothing on the device may use the memory any more."""
    while pieces:
        _cudart().cudaHostUnregister(memory.data_ptr() + pieces.pop())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def cpus_near(device: torch.device) -> frozenset[int]:
    """The cores of the GPU's NUMA node that this process may use; empty where nobody says, or it may use none."""
    try:
        properties: Any = torch.cuda.get_device_properties(device)  # whose stub knows no PCI address
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        listed = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError, AttributeError):
        return frozenset()
    return parse_cpus(listed) & os.sched_getaffinity(0)


def parse_cpus(text: str) -> frozenset[int]:
    """Such as "0-3,8"."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
