"""The texts that the engine is at work on, for those who look at them.

Owns: which there are, and whose. Does not know: how a text is made, who looks.
"""

from collections import defaultdict
from itertools import islice
from typing import NamedTuple

from minserve.api.auth import Caller
from minserve.protocol import Submit
from minserve.text.output import Output


class Text(NamedTuple):
    """What was asked of the engine, and what has come of it so far."""

    submit: Submit
    output: Output


class InFlight:
    """Texts from their submission to their end, each with its caller's others, in the order in which they came."""

    def __init__(self) -> None:
        self._of_tenant: defaultdict[str, dict[str, Text]] = defaultdict(dict)

    def add(self, caller: Caller, text: Text) -> None:
        """The engine is at work on it from now on."""
        self._of_tenant[caller.tenant][text.submit.request_id] = text

    def remove(self, caller: Caller, request_id: str) -> None:
        """It has ended, well or not."""
        del self._of_tenant[caller.tenant][request_id]

    def of(self, caller: Caller, most: int) -> list[Text]:
        """The caller's own, oldest first, and not more than so many."""
        return list(islice(self._of_tenant[caller.tenant].values(), most))

    def has(self, caller: Caller, request_id: str) -> bool:
        """Whether it is one of the caller's own. Of others' they learn nothing, not even that there are some."""
        return request_id in self._of_tenant[caller.tenant]
