"""python -m tests.sim: run many seeds, or one."""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.sim.simulation import make_scenario, shrink, violation


def failing(seeds):
    return [seed for seed in seeds if violation(make_scenario(seed)) is not None]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50_000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else list(range(args.first, args.first + args.seeds))
    begin = time.monotonic()
    with ProcessPoolExecutor(args.jobs) as pool:
        chunks = [seeds[start : start + 250] for start in range(0, len(seeds), 250)]
        failures = [seed for found in pool.map(failing, chunks) for seed in found]
    print(f"{len(seeds)} seeds, {len(failures)} violations, {time.monotonic() - begin:.0f} s")
    for seed in failures[:5]:
        scenario = shrink(make_scenario(seed))
        print(f"\nseed {seed}: {violation(scenario)}\nreplay: python -m tests.sim --seed {seed}\nshrunk: {scenario}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
