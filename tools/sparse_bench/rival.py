"""vLLM on the same model, with all of its KV on the GPU in as much memory: what else one could run.

Owns: how many requests that memory holds, and the processes in which it runs (rival_vllm.py).
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.workload import SHAPES, Timing, Work, as_flags, reports

from .drive import Drafts

NEW_TOKENS = 129
DRAFT_SHARE = 1.03
"""With drafts it is given that much more memory, as its head keeps keys and values in there too."""


class Variant(NamedTuple):
    """A way to run it. name: for people; kv_bytes: of a number of the KV cache; drafts: None: none."""

    name: str
    kv_bytes: int = 2
    drafts: Drafts | None = None

    def flags(self) -> dict[str, Any]:
        own: dict[str, Any] = {"kv_cache_dtype": "fp8"} if self.kv_bytes == 1 else {}
        if self.drafts is not None:
            own |= {"num_draft_tokens": self.drafts.verified, "accepted_length": self.drafts.tokens}
        return own

    def token_bytes(self, config: str) -> int:
        """Of a token's keys and values."""
        fields = SHAPES[config].config
        numbers = 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * fields["head_dim"]
        return int(numbers) * self.kv_bytes

    def works(self, config: str, contexts: Sequence[int], memory_bytes: int) -> list[Work]:
        """As many requests of each length as the memory holds."""
        each = self.token_bytes(config)
        fitting = (memory_bytes // ((context + NEW_TOKENS) * each) for context in contexts)
        return [Work(max(1, most), context, NEW_TOKENS) for most, context in zip(fitting, contexts)]


def variants(names: Sequence[str], drafts: Sequence[Drafts]) -> list[Variant]:
    """names: bf16, fp8, drafts; the last is one for each of the drafts that some are verified of."""
    known = {"bf16": [Variant("vLLM")], "fp8": [Variant("vLLM, fp8 KV", kv_bytes=1)]}
    known["drafts"] = [Variant(f"vLLM, {d.verified} drafts, {d.tokens:g}", drafts=d) for d in drafts if d.verified]
    return [variant for name in names for variant in known[name]]


def run(
    variant: Variant, config: str, contexts: Sequence[int], memory_bytes: int, python: str, path: str | None
) -> Iterator[dict[str, Any]]:
    """A row for each length. Raises ChildError if it fails, with the rows until then given."""
    flags = {
        "config": config,
        "work": variant.works(config, contexts, memory_bytes),
        "kv_cache_memory": int(memory_bytes * (DRAFT_SHARE if variant.drafts else 1)),
        "max_model_len": max(contexts) + 2 * NEW_TOKENS,
        "max_num_seqs": 64,
    } | variant.flags()
    script = Path(__file__).resolve().parents[1] / "rival_vllm.py"
    # From here, or with our own PYTHONPATH, its libraries would find our folders `kernels` and `models`.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        env["PYTHONPATH"] = os.path.abspath(path)
    for _, fields in reports([python or sys.executable, str(script), *as_flags(flags)], env, tempfile.gettempdir()):
        if "version" in fields:
            continue
        timing = Timing(Work(*fields["work"]), fields["first_s"], fields["whole_s"])
        yield {
            "side": variant.name,
            "requests": timing.work.requests,
            "context": timing.work.context,
            "step_ms": timing.step_ms * (variant.drafts.tokens if variant.drafts else 1),
            "tokens_s": timing.decode_rate,
            "tokens_step": variant.drafts.tokens if variant.drafts else 1.0,
            "kv_bytes_step": timing.work.requests * timing.work.context * variant.token_bytes(config),
        }
