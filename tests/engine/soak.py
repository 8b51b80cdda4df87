"""Random traffic that is given up at random moments, on a tiny model with too few pages.

python -m tests.engine.soak --aborts 10000      counts what is left over, and what the process's memory does
python -m tests.engine.soak --aborts 10000 --sparse     whoever passes 48 tokens becomes sparse
"""

import argparse
import random
import resource
import sys
import tempfile
from pathlib import Path

from tests.engine.tiny import VOCAB, finish, submit, tiny_engine

PAGE_BYTES = 2 * 2 * 2 * 16 * 8 * 4
PROMPT = [random.Random(1).randrange(VOCAB) for _ in range(40)]

HOST_KV = {"host_kv": 40 * PAGE_BYTES}
SPARSE = {"host_kv": 60 * PAGE_BYTES, "sparse": "above", "sparse_above": 48, "working_set_blocks": 3}


def small_engine(folder, **options):
    """24 pages for up to six requests of up to 250 tokens."""
    return tiny_engine(
        folder,
        kv_cache_memory=24 * PAGE_BYTES,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        **options,
    )


def answer(engine):
    """What the engine says to one undisturbed request."""
    deltas = finish(engine, submit("whole", PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True))["whole"]
    return [token for delta in deltas for token in delta.token_ids]


def soak(engine, num_aborts, seed, *, every=0, report=print):
    """Abort so many requests at random moments; each must end exactly once. How many there were in all."""
    rng = random.Random(seed)
    alive, ended = set(), set()
    number = aborted = 0

    def step():
        for delta in engine.step().deltas:
            assert delta.request_id not in ended, "a delta after the end"
            if delta.finish_reason is not None:
                ended.add(delta.request_id)
                alive.discard(delta.request_id)
        engine.check()

    while aborted < num_aborts:
        while len(alive) < 9:
            number += 1
            prompt = (PROMPT + [rng.randrange(VOCAB) for _ in range(150)])[: rng.randint(1, 190)]
            engine.submit(submit(f"r{number}", prompt, max_tokens=rng.randint(1, 60), seed=number))
            alive.add(f"r{number}")
        if rng.random() < 0.7:
            engine.abort(rng.choice(sorted(alive)))
            aborted += 1
            if every and aborted % every == 0:
                report(f"{aborted} aborts, {peak_mib():.1f} MiB")
        step()
    engine.abort_all()
    while engine.has_work:
        step()
    assert len(ended) == number
    return number


def peak_mib():
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.engine.soak", description=__doc__)
    parser.add_argument("--aborts", type=int, default=10_000)
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = small_engine(Path(folder), run_ahead=1, **(SPARSE if args.sparse else HOST_KV))
        expected = answer(engine)
        number = soak(engine, args.aborts, seed=7, every=max(1, args.aborts // 10))
        stats = engine.step().stats
        print(f"{number} requests, {stats.num_preemptions} preemptions, {stats.num_demotions} became sparse")
        print(f"left over: {stats.num_pages_used} pages")
        right = answer(engine) == expected
        print("the next request is right:", right)
        sys.exit(not right or stats.num_pages_used > 0)


if __name__ == "__main__":
    main()
