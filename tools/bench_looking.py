#!/usr/bin/env python3
"""What it costs the engine that somebody looks at it: /stats/stream beside a request that decodes on the CPU.

The default model and one request of 1,500 tokens. Wanted: at most 1% of a step.

First the engine alone, sparse: the processor time of a step, and of a look as the engine's loop answers it, once after
each step. A viewer takes one a second, so their ratio over the steps of a second is the cost. This is exact on a busy
machine too.

Then real processes, dense and sparse, every few seconds another of three: nobody looks, one viewer of the figures, one
who also has the request's working set. A step's processor time is that of all threads of the engine's process; the time
between tokens is as the client sees it. Both vary by some percent where others use the same caches.

    PYTHONPATH=. OMP_NUM_THREADS=1 tools/bench_looking.py [--rounds 9] [--seconds 6]
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the tests' own servers

from minserve.config import EngineConfig
from minserve.engine import wire
from minserve.engine.build import build_engine
from minserve.protocol import SamplingParams, Seen, Submit
from minserve.weights.default_model import ensure_default_model
from tests.api.real import RealServer, engine_process_of

SPARSE = ("--sparse", "above:0", "--host-kv", "256MiB", "--working-set-blocks", "16")
MODES = ("nobody", "the figures", "a working set")
PROMPT_TOKENS = 1500


class Window(NamedTuple):
    """Per step: processor time of the engine, median time between tokens. api: the API process's share of a core."""

    engine_ms: float
    gap_ms: float
    api: float


def cpu_s(pid: int) -> float:
    """The processor time of a process's threads, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


class Decoding:
    """A request that decodes, and the times of its events, one a step."""

    def __init__(self, server: RealServer, http: aiohttp.ClientSession) -> None:
        self.request_id = ""
        self.times: list[float] = []
        self._server, self._http = server, http
        self._begun = asyncio.Event()
        self._engine, self._api = engine_process_of(server.process.pid), server.process.pid

    async def read(self) -> None:
        """Read the stream for ever."""
        body = {"prompt": prompt(), "max_tokens": 6000, "temperature": 0, "ignore_eos": True, "stream": True}
        async with self._http.post(f"{self._server.url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())
                    self.request_id = self.request_id or json.loads(line.removeprefix(b"data: "))["id"] + "-0"
                    self._begun.set()

    async def window(self, seconds: float) -> Window:
        """So many seconds of it."""
        await self._begun.wait()
        first, begin, engine_s, api_s = len(self.times), time.monotonic(), cpu_s(self._engine), cpu_s(self._api)
        await asyncio.sleep(seconds)
        times = self.times[first:]
        engine_s, api_s = cpu_s(self._engine) - engine_s, cpu_s(self._api) - api_s
        gaps = [1000 * (after - before) for before, after in pairwise(times)]
        return Window(1000 * engine_s / len(times), statistics.median(gaps), api_s / (time.monotonic() - begin))

    @asynccontextmanager
    async def looked_at(self, mode: str) -> AsyncIterator[None]:
        """Somebody looks, and has seen the first event."""
        if mode == "nobody":
            yield
            return
        query = f"?request={self.request_id}" if mode == "a working set" else ""
        async with self._http.get(f"{self._server.url}/stats/stream{query}") as response:
            await response.content.readline()
            reading = asyncio.create_task(response.read())
            yield
            reading.cancel()


def measure_looks(num_steps: int) -> None:
    """The engine alone: what a look takes, and what a step does."""
    config = EngineConfig.checked(
        model_path=str(ensure_default_model()), device="cpu", kv_cache_memory=2**29, max_num_seqs=4, host_kv=2**28,
        sparse="above", sparse_above=0, working_set_blocks=16,
    )  # fmt: skip
    engine = build_engine(config)
    params = SamplingParams(max_tokens=num_steps + 10, temperature=0.0, ignore_eos=True)
    engine.submit(Submit(request_id="a", prompt_token_ids=prompt(), params=params))
    encoder = msgspec.msgpack.Encoder()
    while engine.working_set("a") is None:
        engine.step()
    step_s, look_s = [], []
    for _ in range(num_steps):
        begin = time.thread_time()
        engine.step()
        stepped = time.thread_time()
        wire.encode(encoder, Seen("a", engine.working_set("a")))
        look_s.append(time.thread_time() - stepped)
        step_s.append(stepped - begin)
    step_ms, look_ms = 1000 * statistics.median(step_s), 1000 * statistics.median(look_s)
    print(
        f"engine alone, sparse: a step {step_ms:.1f} ms, a look {look_ms:.3f} ms; one a second takes "
        f"{look_ms / 10:.3f}% of the engine's time",
        flush=True,
    )


def prompt() -> list[int]:
    return random.Random(0).choices(range(1000, 40_000), k=PROMPT_TOKENS)


async def measure(name: str, flags: tuple[str, ...], rounds: int, seconds: float) -> None:
    server = await asyncio.to_thread(RealServer, "--draft", "none", *flags)
    try:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            decoding = Decoding(server, http)
            reading = asyncio.create_task(decoding.read())
            await decoding.window(seconds)
            windows: dict[str, list[Window]] = {mode: [] for mode in MODES}
            for number in range(rounds):
                # Each mode comes first, second and third as often as the others: steps get slower as the text grows.
                for mode in MODES[number % 3 :] + MODES[: number % 3]:
                    async with decoding.looked_at(mode):
                        windows[mode].append(await decoding.window(seconds))
            reading.cancel()
        show(name, windows)
    finally:
        server.end()


def show(name: str, windows: dict[str, list[Window]]) -> None:
    """Medians, and the medians of each round's ratio to nobody's."""
    for mode, seen in windows.items():
        ratios = [
            [after / before for before, after in zip(one, other, strict=True)]
            for one, other in zip(windows["nobody"], seen, strict=True)
        ]
        middle = Window(*(statistics.median(values) for values in zip(*seen, strict=True)))
        cpu, gap, _ = (statistics.median(values) for values in zip(*ratios, strict=True))
        print(
            f"{name:6} {mode:13}  engine {middle.engine_ms:7.2f} ms a step ({cpu:.4f}x)  "
            f"between tokens {middle.gap_ms:7.2f} ms ({gap:.4f}x)  API process {100 * middle.api:.2f}% of a core",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    measure_looks(num_steps=50)
    for name, flags in (("dense", ()), ("sparse", SPARSE)):
        asyncio.run(measure(name, flags, args.rounds, args.seconds))


if __name__ == "__main__":
    main()
