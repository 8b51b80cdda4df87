"""What the scheduler keeps in mind: of a step that it is deciding on, and of those that it has launched.

Owns: these records. Imports no torch.
"""

from dataclasses import dataclass, field

from minserve.engine.plan import Chunk, Demotion
from minserve.engine.request import Request


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launched step does for one request: computes its tokens up to num_computed, and perhaps samples.

    chunk: None for a decode, which verifies num_drafts drafts. is_sparse: as a sparse lane.
    """

    request: Request
    num_computed: int
    samples: bool
    chunk: Chunk | None
    num_drafts: int = 0
    is_sparse: bool = False


@dataclass(slots=True)
class Decisions:
    """A plan in the making. counts: how many tokens each request computes; num_drafts: and how many drafts, if it
    decodes. demotions: who becomes sparse; what is decided after that must not take a page of theirs."""

    num_drafts: int = 0
    counts: dict[Request, int] = field(default_factory=dict)
    new_pages: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    demotions: list[Demotion] = field(default_factory=list)
    preempted: bool = False
