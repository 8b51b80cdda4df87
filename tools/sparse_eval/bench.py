"""The lane on which everything is measured, and places to begin from: prompts that it has read.

Owns: the engine that lends its parts, and how often a prompt is read: once. Does not know: what is measured.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minserve.config import EngineConfig
from minserve.engine.build import build_engine
from minserve.kernels.sparse_rows import RING
from minserve.memory.blocks import blocks_for
from minserve.memory.pages import KVPages
from minserve.models.config import ModelConfig
from tools.sparse_lab import Snapshot, SparseLab

from .follow import Seen, follow
from .policies import Policy

ROOM = 64
"""Tokens that a lane may go on for beyond what is asked for, when a step gives several."""

MOST_DRAFTS = 3


class Bench:
    """num_tokens: of the longest text, answer and all; host_dtype: of host blocks; None: as in pages."""

    def __init__(
        self,
        model: Path,
        head: Path | None,
        num_tokens: int,
        device: str,
        dtype: str,
        host_dtype: torch.dtype | None = None,
    ) -> None:
        config = ModelConfig.from_folder(model)
        chunk = 2048 if device == "cuda" else 512
        self.num_tokens = min(num_tokens + ROOM, config.max_position_embeddings)
        num_pages = blocks_for(self.num_tokens) + RING
        options: dict[str, Any] = {} if head is None else {"draft_path": str(head), "num_draft_tokens": MOST_DRAFTS}
        engine = build_engine(
            EngineConfig.checked(
                model_path=str(model),
                device=device,
                dtype=dtype,
                max_model_len=self.num_tokens,
                max_num_seqs=1,
                max_num_batched_tokens=chunk,
                kv_cache_memory=num_pages * KVPages.bytes_per_page(config, torch.float32),
                sparse="never",
                enforce_eager=True,
                **options,
            )
        )
        self.has_head = head is not None
        self.lab = SparseLab(engine, chunk=chunk, host_dtype=host_dtype)
        self.num_layers, _, self.kv_heads, _, _, self.head_dim = self.lab.kv.shape
        self.piece_bytes = self.lab.kv[0, 0, 0].numel() * (host_dtype or self.lab.kv.dtype).itemsize
        """Of one block of one KV head of one layer: what a fetch moves."""
        self._bar = tqdm(unit=" steps", disable=None)
        self._starts: dict[tuple[int, ...], Snapshot] = {}

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.num_layers * self.kv_heads

    def start(self, prompt: Sequence[int], text: Sequence[int] = (), *, keep: bool = True) -> Snapshot:
        """A lane that has read the prompt, and decoded for a step. text: see `follow`; keep: it is asked for again."""
        key = (*prompt, -1, *text)
        if key in self._starts:
            return self._starts[key]
        lab, num_prompt = self.lab, len(prompt)
        lab.num_drafts = MOST_DRAFTS if self.has_head else 0
        lab.use(1)
        lab.read(prompt, self.num_tokens - num_prompt, forced=text[num_prompt : num_prompt + 1])
        lab.decode(forced=text[num_prompt + 1 : num_prompt + 2 + lab.num_drafts])
        start = lab.snapshot()
        if keep:
            self._starts[key] = start
        return start

    def follow(self, start: Snapshot, policy: Policy, until: int, text: Sequence[int] = ()) -> Iterator[Seen]:
        """As the function."""
        self._bar.set_description(policy.name)
        for seen in follow(self.lab, start, policy, until, text):
            self._bar.update()
            yield seen
