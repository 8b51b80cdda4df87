"""Seeded scenarios: random traffic on a random machine, replayed exactly from a number.

python -m tests.sim --seeds 50000          run them; a seed that fails is shrunk and printed
python -m tests.sim --seed 1234            run one
"""

import random
from dataclasses import dataclass, replace

from minserve.config import BLOCK_SIZE
from tests.sim.device import VOCAB, Link
from tests.sim.sparse_traffic import reload_actions, sparse_actions, sparse_machine
from tests.sim.world import World

Action = tuple


@dataclass(frozen=True)
class Scenario:
    """A machine and what happens to it. actions: ("submit", id, prompt, max_tokens, salt, params), ("abort", id),
    ("step", count), ("clear",), ("forget pages",)."""

    seed: int
    machine: dict
    link: Link
    actions: tuple[Action, ...]

    @property
    def request_ids(self):
        return [action[1] for action in self.actions if action[0] == "submit"]

    def without(self, request_id):
        """The same without one request."""
        return replace(self, actions=tuple(a for a in self.actions if len(a) == 1 or a[1] != request_id))


def make_scenario(seed):
    """Small machines, so that pages run out; few prefixes, so that they repeat; lengths at the edges of blocks."""
    if seed % 8 == 7:
        return _churn(seed)
    if seed % 4 == 2:
        return _sparse(seed)
    rng = random.Random(seed)
    num_pages = rng.randint(4, 12)
    machine = {
        "num_pages": num_pages,
        "max_num_seqs": rng.choice([1, 2, 3, 4, 5]),
        "max_num_batched_tokens": rng.choice([5, 16, 17, 33, 64]),
        "prefix_caching": rng.random() < 0.9,
        "num_host_blocks": rng.choice([0, 2, 8, 30]),
        "prefill_reserve": rng.choice([0, 0, 2, num_pages // 2]),
        "run_ahead": rng.choice([0, 1, 1]),
        "late_steps": rng.random() < 0.8,
    }
    link = Link(
        seed=seed,
        max_delay=rng.choice([1, 3, 20, 60]),
        failure_rate=rng.choice([0.0, 0.0, 0.1, 0.5]),
        repeat_rate=rng.choice([0.0, 0.0, 0.2]),
    )
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(num_pages * BLOCK_SIZE)] for _ in range(rng.randint(1, 3))]
    longest = (num_pages - machine["prefill_reserve"]) * BLOCK_SIZE
    actions = tuple(_actions(rng, prefixes, longest, storm=rng.random() < 0.4))
    machine["chunk_step"] = rng.choice([1, 1, 8, 32])
    machine["num_drafts"] = (1, 3, 8, 0, 0)[seed % 5]
    return Scenario(seed, machine, link, actions)


def _churn(seed):
    """Six that all decode in pages for four: who gave way comes back for pages that somebody left, and has to give way
    again before all of it is loaded."""
    rng = random.Random(seed // 8)
    machine = {"num_pages": 20, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_host_blocks": 60}
    machine |= {"run_ahead": rng.choice([0, 1]), "late_steps": rng.random() < 0.8}
    actions = []
    for number in range(6):
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(20, 60)))
        params = {"ignore_eos": True, "prompt_logprobs": None}
        actions.append(("submit", f"r{number}", prompt, rng.randint(5, 90), "", params))
        if steps := rng.choice([0, 0, 1, 2, 5]):
            actions.append(("step", steps))
    return Scenario(seed, machine, Link(seed=seed // 8, max_delay=20), tuple(actions))


def _sparse(seed):
    """Requests become sparse, when others need their pages or of their own accord."""
    rng = random.Random(seed)
    machine = sparse_machine(rng)
    link = Link(
        seed=seed,
        max_delay=rng.choice([1, 1, 3, 20]),
        failure_rate=rng.choice([0.0, 0.0, 0.1, 0.4]),
        repeat_rate=rng.choice([0.0, 0.2]),
    )
    longest = (machine["num_pages"] - machine["prefill_reserve"]) * BLOCK_SIZE
    if seed % 8 == 2:
        return Scenario(seed, machine, link, tuple(sparse_actions(rng, longest)))
    machine |= {"num_host_blocks": 100, "prefill_reserve": 0, "run_ahead": 1, "max_num_seqs": 8}
    return Scenario(seed, machine, replace(link, failure_rate=0.0), tuple(reload_actions(rng, longest)))


def _actions(rng, prefixes, longest, storm):
    """storm: short prompts and long answers, so that requests are let in and have to give way."""
    names, prompts = [], []
    for number in range(rng.randint(2, 10)):
        shared = rng.choice([0, 15, 16, 17, 32, 48, rng.randint(0, longest)])
        prompt = rng.choice(prefixes)[:shared] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 40))]
        prompt = prompt[: longest // 4 if storm else rng.choice([longest // 4, longest // 2, longest - 1])]
        if prompts and rng.random() < 0.3:
            prompt = rng.choice(prompts[-2:])
        prompts.append(prompt)
        max_tokens = rng.randint(1, min(100 if storm else rng.choice([2, 20, 100]), longest - len(prompt)))
        names.append(f"r{number}")
        params = {"ignore_eos": storm or rng.random() < 0.6, "prompt_logprobs": rng.choice([None, None, None, 0])}
        yield "submit", names[-1], tuple(prompt), max_tokens, rng.choice(["", "", "", "other"]), params
        steps = rng.choice([0, 0, 1, 2, 5, 30])
        if steps:
            yield "step", steps
        if rng.random() < 0.25:
            yield "abort", rng.choice(names)
        if rng.random() < 0.15:
            yield (rng.choice(["clear", "forget pages"]),)


def simulate(scenario):
    """Run a scenario. AssertionError says which rule was broken."""
    world = World(link=scenario.link, **scenario.machine)
    for kind, *rest in scenario.actions:
        if kind == "submit":
            request_id, prompt, max_tokens, salt, params = rest
            world.submit(request_id, prompt, max_tokens, salt, **params)
        elif kind == "abort":
            world.abort(rest[0])
        elif kind == "clear":
            world.clear()
        elif kind == "forget pages":
            world.blocks.forget_pages()
        else:
            for _ in range(rest[0]):
                world.step()
    world.run()
    return world


def violation(scenario):
    """What goes wrong, or None."""
    try:
        simulate(scenario)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
    return None


def shrink(scenario):
    """A scenario that still goes wrong, and would not with any one request fewer."""
    for request_id in scenario.request_ids:
        smaller = scenario.without(request_id)
        if violation(smaller) is not None:
            return shrink(smaller)
    return scenario
