"""Planted bugs of speculation: rejected drafts that leave a trace, accepted ones that are not accounted for."""

from minserve.engine.request import Request
from minserve.engine.scheduler import Scheduler
from minserve.memory.blocks import BlockManager
from tests.sim.bugs import bug


@bug("drafts have no pages of their own")
def no_reach():
    return Request, "reach", lambda self, count, num_drafts: self.num_computed + count


@bug("drafts in flight are forgotten when pages are taken")
def short_reach():
    original = Request.reach

    def reach(self, count, num_drafts):
        in_flight, self.num_drafts_in_flight = self.num_drafts_in_flight, 0
        try:
            return original(self, count, num_drafts)
        finally:
            self.num_drafts_in_flight = in_flight

    return Request, "reach", reach


@bug("accepted drafts go on after the end")
def past_the_end():
    original = Request.take

    def take(self, token_ids):
        _, reason = original(self, token_ids)
        return len(token_ids), reason

    return Request, "take", take


@bug("rejected drafts count as computed")
def rejected_computed():
    original = Scheduler._take_tokens

    def take_tokens(self, entry, token_ids, logprobs):
        delta = original(self, entry, token_ids, logprobs)
        entry.request.num_computed += 1 + entry.num_drafts - len(token_ids)
        return delta

    return Scheduler, "_take_tokens", take_tokens


@bug("accepted drafts count as yet to be computed")
def accepted_not_computed():
    original = Scheduler._take_tokens

    def take_tokens(self, entry, token_ids, logprobs):
        delta = original(self, entry, token_ids, logprobs)
        entry.request.num_computed -= len(token_ids) - 1
        return delta

    return Scheduler, "_take_tokens", take_tokens


@bug("a block with rows that are still to be verified is published")
def early_publication():
    original = BlockManager.publish

    def publish(self, request_id, token_ids, num_tokens):
        room = len(self._tables[request_id].pages) * 16
        original(self, request_id, token_ids, min(len(token_ids), num_tokens + 1, room))

    return BlockManager, "publish", publish
