"""Scenarios in which requests become sparse: few slots, long answers, and prompts that go on with what was answered."""

from minserve.engine.sparse_rules import SparseRules
from minserve.protocol import SparseParams
from tests.sim.device import HEADS, VOCAB
from tests.sim.world import Text


def sparse_rules(num_slots, **options):
    """The server's rules, on a device of one layer."""
    values = {
        "mode": "pressure",
        "above": 0,
        "num_slots": num_slots,
        "fetch": "adaptive",
        "fetch_ratio": 0.5,
        "lookahead": None,
        "num_verified": 0,
        "miss_policy": "approximate",
        "has_head": False,
        "num_layers": 1,
        "num_kv_heads": HEADS,
        "head_block_bytes": 1,
        "link_bytes_s": None,
    }
    return SparseRules.of(**values | options)


def sparse_machine(rng):
    num_pages, num_drafts = rng.randint(8, 20), rng.choice([0, 1, 3, 8])
    rules = sparse_rules(
        rng.randint(1, 3),
        mode=rng.choice(["pressure", "pressure", "above", "above"]),
        above=rng.choice([0, 0, 30]),
        fetch=rng.choice(["adaptive", "fixed"]),
        lookahead=rng.choice([None, "current"]),
        num_verified=rng.choice([0, 1, 3, 8]),
        miss_policy=rng.choice(["approximate", "retry", "retry", "recall"]),
        has_head=num_drafts > 0,
        link_bytes_s=(None, 1.0, 100.0)[num_pages % 3],
    )
    return {
        "num_pages": num_pages,
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([17, 64]),
        "num_host_blocks": rng.choice([6, 16, 24, 60, 100]),
        "prefill_reserve": rng.choice([0, 0, num_pages // 2]),
        "run_ahead": rng.choice([0, 1, 1]),
        "late_steps": rng.random() < 0.8,
        "num_drafts": num_drafts,
        "sparse": rules,
    }


def sparse_actions(rng, longest):
    """longest: tokens that a request may have."""
    names, texts = [], []
    prefix = [rng.randrange(1, VOCAB) for _ in range(longest)]
    for number in range(rng.randint(3, 7)):
        shared = rng.choice([0, 16, 40, longest // 2, longest // 2])
        prompt = prefix[:shared] + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))]
        if texts and rng.random() < 0.4:
            prompt = rng.choice(texts[-2:])[: rng.choice([-1, 64, longest])]
            prompt = prompt + [rng.randrange(1, VOCAB) for _ in range(rng.choice([0, 1, 20]))]
        prompt = prompt[: longest - rng.choice([2, 40, 40])]
        max_tokens = rng.randint(1, min(rng.choice([8, 100, 100]), longest - len(prompt)))
        texts.append(Text(prompt).upto(len(prompt) + max_tokens))
        names.append(f"r{number}")
        params = {"ignore_eos": rng.random() < 0.9, "sparse": _wish(rng)}
        yield "submit", names[-1], tuple(prompt), max_tokens, rng.choice(["", "", "", "other"]), params
        if steps := rng.choice([0, 1, 5, 10, 30]):
            yield "step", steps
        if rng.random() < 0.15:
            yield "abort", rng.choice(names)
        if rng.random() < 0.1:
            yield (rng.choice(["clear", "forget pages"]),)


def reload_actions(rng, longest):
    """Everybody begins with what host blocks hold, and loads it into the pages that somebody has just left."""
    prompts = [tuple(rng.randrange(1, VOCAB) for _ in range(longest // 2)) for _ in range(2)]
    for number, prompt in enumerate(prompts):
        yield "submit", f"first{number}", prompt, 1, "", {}
    yield "step", 60
    yield ("forget pages",)
    for number in range(rng.randint(5, 8)):
        prompt = rng.choice(prompts)[: rng.randint(longest // 4, longest // 2)]
        params = {"ignore_eos": True, "sparse": SparseParams(mode=rng.choice([None, "always", "always"]))}
        yield "submit", f"r{number}", (*prompt, number + 1), rng.randint(1, min(30, longest // 2 - 1)), "", params
        if steps := rng.choice([0, 0, 1, 3]):
            yield "step", steps
        if rng.random() < 0.6:
            yield ("forget pages",)


def _wish(rng):
    """What a request asks of its working set."""
    if rng.random() < 0.6:
        return None
    return SparseParams(
        mode=rng.choice([None, "never", "always", "always"]),
        verify_drafts=rng.choice([None, None, 0, 2]),
        cap=rng.choice([None, None, 1]),
    )
