"""What a busy server might say for five minutes, and a conversation: for pictures, and for plots that need a past."""

import math
import random

from minserve.api.figures import Figures
from minserve.api.stats import RequestFigures, StatsEvent
from minserve.protocol import WorkingSet

NUM_PAGES = 8192
NUM_HOST_BLOCKS = 65536

QUESTION = "What does a KV cache hold, and why is it cut into blocks?"

REASONING = "They ask what is stored, and then why in blocks. First the one, then the other, with a small example."

REPLY = """\
For every token that has been read, each layer keeps a **key** and a **value** of each KV head. Attention compares the \
new token's query with all keys and adds up the values, so nothing is computed twice.

It is cut into blocks of 16 tokens, because then

1. a text may grow without being moved,
2. equal beginnings are stored *once* and shared, and
3. what is not needed just now can lie in host memory.

```python
def blocks(num_tokens: int, size: int = 16) -> int:
    return -(-num_tokens // size)
```

| tokens | blocks | per layer |
|---|---|---|
| 32,768 | 2,048 | 128 MB |
"""


def wave(second: int, period: float, low: float, high: float, phase: float = 0.0) -> float:
    return low + (high - low) * (0.5 + 0.5 * math.sin(2 * math.pi * (second / period + phase)))


def figures_at(second: int, rng: random.Random, *, sparse: bool) -> Figures:
    """The figures of one second of a load that swells, with a burst of long prompts in the middle."""
    burst = math.exp(-(((second - 170) / 16) ** 2))
    running = round(wave(second, 210, 9, 22) + 9 * burst + rng.uniform(-0.4, 0.4))
    answers = rng.random() < 0.55 + 0.4 * burst
    figures = Figures(
        num_running=running,
        num_waiting=round(max(0.0, 11 * burst - 1)),
        num_pages=NUM_PAGES,
        num_pages_used=round(NUM_PAGES * min(0.99, 0.031 * running + 0.06 + rng.uniform(0, 0.01))),
        num_host_blocks=NUM_HOST_BLOCKS,
        num_host_blocks_used=round(NUM_HOST_BLOCKS * (0.22 + 0.0011 * second)),
        prompt_tokens_per_s=(rng.uniform(600, 1400) if answers else 0.0) + 9000 * burst,
        generation_tokens_per_s=running * rng.uniform(86, 90) * (1 - 0.25 * burst),
        acceptance=[share + rng.uniform(-0.02, 0.02) for share in (0.72, 0.52, 0.38)],
    )
    if answers:
        figures.time_to_first_token_s = rng.uniform(0.05, 0.12) + 0.6 * burst
        figures.prefix_hit_rate = min(1.0, wave(second, 130, 0.55, 0.85) + rng.uniform(-0.08, 0.08))
    if sparse:
        figures.num_sparse = round(0.6 * running)
        figures.working_set_hit_rate = 0.97 + rng.uniform(-0.015, 0.01)
        figures.surprises_per_s = 400 + 900 * burst + rng.uniform(0, 150)
        figures.link_bytes_per_s = (12 + 24 * burst + rng.uniform(-1.5, 1.5)) * 1e9
    return figures


def history(*, seconds: int = 300, sparse: bool = False) -> list[StatsEvent]:
    """One event a second, the same every time."""
    rng = random.Random(9)
    requests = [
        RequestFigures(f"chatcmpl-{rng.getrandbits(64):016x}-0", prompt, cached, tokens)
        for prompt, cached, tokens in ((16_214, 12_288, 391), (7_902, 0, 122), (1_160, 1_152, 64))
    ]
    return [
        StatsEvent(1_800_000_000.0 + second, figures_at(second, rng, sparse=sparse), requests)
        for second in range(seconds)
    ]


def working_set(
    request_id: str, second: int, *, num_blocks: int = 1024, layers: int = 30, heads: int = 3
) -> WorkingSet:
    """A working set that moves: each head keeps the first block, the last ones and some islands that drift."""
    rows_held, rows_fetched = [], []
    for row in range(layers * heads):
        held, before = _held(row, second, num_blocks), _held(row, second - 1, num_blocks)
        rows_held.append(_packed(held, num_blocks))
        rows_fetched.append(_packed(held - before, num_blocks))
    return WorkingSet(request_id, num_blocks, layers, heads, b"".join(rows_held), b"".join(rows_fetched))


def _held(row: int, second: int, num_blocks: int) -> set[int]:
    rng = random.Random(row)
    held = {0, *range(num_blocks - 3, num_blocks)}
    for _ in range(11):
        centre, speed, width = rng.random() * num_blocks, rng.uniform(-1.2, 1.2), rng.randint(2, 16)
        first = int(centre + speed * second)
        held |= {block % num_blocks for block in range(first, first + width)}
    return held


def _packed(blocks: set[int], num_blocks: int) -> bytes:
    row = bytearray(-(-num_blocks // 8))
    for block in blocks:
        row[block // 8] |= 1 << block % 8
    return bytes(row)
