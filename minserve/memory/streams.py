"""Streams of a CUDA device, as `StreamCopies` wants them.

Owns: one stream. Does not know: what runs on it.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch


class CudaStream:
    """Of a device, of ordinary priority."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[Any]:
        """As `Stream`."""
        return torch.cuda.stream(self._stream)

    def record_event(self) -> torch.cuda.Event:
        """As `Stream`."""
        event: torch.cuda.Event = self._stream.record_event()
        return event
