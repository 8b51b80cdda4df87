#!/usr/bin/env python3
"""What strangers cost the others: stalled readers, a burst, hostile bodies. The real server over a scripted engine.

Wanted: beside 64 readers that stall, 16 others' p99 gap between tokens at most 1.1 times what it is alone, and at most
32 MiB; of 2,000 requests within a second and room for 256, every one refused within 20 ms (p99) or answered; bodies
made to hurt hold up a probe for at most 50 ms. Client and server are two processes: give each a core of its own.

    PYTHONPATH=. taskset -c 1 tools/bench_strangers.py --under "taskset -c 0" [stalled] [burst] [bodies]
"""

import argparse
import asyncio
import gc
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from pathlib import Path

import burst_client
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the tests' own servers

from minserve.api.server import Server, bind
from minserve.api.service import Service
from minserve.config import ServerConfig
from minserve.protocol import Delta, Submit
from minserve.text.renderer import Renderer
from tests.api import tiny
from tests.api.fake_engine import FakeEngine

MIB = 2**20
TOKENS = "vllm:generation_tokens_total{"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LONG = {"logprobs": True, "top_logprobs": 20}


class PacedEngine(FakeEngine):
    """One token of each request every step_s."""

    step_s = 0.005

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        async with aclosing(super().generate(submit)) as deltas:
            async for delta in deltas:
                await asyncio.sleep(self.step_s)
                yield delta


async def serve(step_s: float) -> None:
    """The server's process: prints its port."""
    with tempfile.TemporaryDirectory() as name:
        folder = tiny.write_model_folder(Path(name))
        tokenizer, template = tiny.load(folder)
        engine = PacedEngine(tokenizer, max_model_len=100_000, max_num_seqs=128)
        engine.step_s, engine.reply = step_s, tokenizer.encode("x", add_special_tokens=False) * 60_000
        config = ServerConfig(model_path=name, served_model_names=("tiny",), max_num_waiting=128)
        sock = bind("127.0.0.1", 0)
        with closing(Renderer(template)) as renderer:
            # Longer than the measurement, so that those who stall are still there.
            server = Server(Service(config, engine, tokenizer, renderer), sock, stall_s=3600)
            await server.start()
            gc.collect()
            gc.freeze()  # as the command does
            print(sock.getsockname()[1], flush=True)
            await server.run()


class Run:
    """A server's process, and what is asked of it over raw sockets."""

    def __init__(self, step_s: float, under: str = "") -> None:
        command = [*under.split(), sys.executable, __file__, "serve", str(step_s)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / MIB

    def core_s(self) -> tuple[float, float]:
        """Seconds that the server's main thread has had a core, and that it has waited for one while it could run."""
        had, waited, _ = Path(f"/proc/{self.process.pid}/schedstat").read_text().split()
        return int(had) / 1e9, int(waited) / 1e9

    async def num_tokens(self) -> float:
        """The tokens that the engine has generated."""
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(TOKENS))

    async def ask(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(request(body))
        return reader, writer

    async def gaps_s(self) -> list[float]:
        """The times between events of 16 streams."""
        gaps: list[float] = []

        async def stream() -> None:
            reader, writer = await self.ask(json.dumps(CHAT | {"stream": True, "max_tokens": 800}).encode())
            last = 0.0
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    gaps.extend([now - last] if last else [])
                    last = now
            writer.close()

        await asyncio.gather(*(stream() for _ in range(16)))
        return gaps

    def stall(self) -> socket.socket:
        """A client with a small buffer that asks for much and reads nothing."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(self.address)
        sock.sendall(request(json.dumps(CHAT | {"stream": True, "max_tokens": 50_000} | LONG).encode()))
        return sock


def request(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def stalled(run: Run) -> None:
    before, rss = await run.gaps_s(), run.rss_mib()
    clients = [run.stall() for _ in range(64)]
    num_tokens = -1.0
    while num_tokens != (num_tokens := await run.num_tokens()):  # until all their buffers are full
        await asyncio.sleep(1)
    beside = await run.gaps_s()
    for share in (0.5, 0.99):
        alone_ms, beside_ms = 1000 * percentile(before, share), 1000 * percentile(beside, share)
        print(f"p{100 * share:.0f} gap: alone {alone_ms:.1f} ms, beside 64 that stall {beside_ms:.1f} ms")
    print(f"memory: +{run.rss_mib() - rss:.1f} MiB")
    for client in clients:
        client.close()


async def burst(run: Run) -> None:
    body = json.dumps(CHAT | {"max_tokens": 30}).encode()
    had_s, waited_s = run.core_s()
    answers, took_s = await asyncio.to_thread(burst_client.burst, run.address, request(body), 2000, 1.0)
    refused = [answer for answer in answers if answer.status == 503]
    num_answered = sum(answer.status == 200 for answer in answers)
    print(f"{num_answered} answered, {len(refused)} refused of {len(answers)}, sent within {took_s:.2f} s")
    ms = [1000 * answer.seconds for answer in refused]
    late_ms = [1000 * answer.late_s for answer in refused]
    shares = ", ".join(f"p{100 * share:g} {percentile(ms, share):.1f}" for share in (0.5, 0.99, 0.999))
    print(f"refused after: {shares}, at most {max(ms):.1f} ms; read by the client up to {max(late_ms):.1f} ms later")
    now_had_s, now_waited_s = run.core_s()
    print(f"the server had a core for {now_had_s - had_s:.2f} s, and waited {now_waited_s - waited_s:.2f} s for one")


async def bodies(run: Run) -> None:
    lags: list[float] = []

    async def probe() -> None:
        reader, writer = await asyncio.open_connection(*run.address)
        while True:
            begin = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"}")
            lags.append(time.perf_counter() - begin)
            await asyncio.sleep(0.002)

    # Made beforehand: the making would hold up the probe too.
    units = (b"[]", b"{}", b"1", b"128000", b"null", b'""', b'{"a":1}', b"1.5", b'"' + b"a" * (4 * MIB - 40) + b'"')
    arrays = [b",".join([unit] * ((4 * MIB - 20) // (len(unit) + 1))) for unit in units]
    requests = [request(b'{"prompt":[%s]}' % array, "/v1/completions") for array in arrays]
    probing = asyncio.create_task(probe())
    for unit, data in zip(units, requests, strict=True):
        await asyncio.sleep(1)
        lags.clear()
        rss = run.rss_mib()
        status = (await asyncio.to_thread(send, run.address, data)).split()[1].decode()
        print(
            f"4 MiB of {unit[:8].decode():8}: {status}, probe {1000 * max(lags):.0f} ms, +{run.rss_mib() - rss:.0f} MiB"
        )
    probing.cancel()


def send(address: tuple[str, int], data: bytes) -> bytes:
    with socket.create_connection(address) as sock:
        sock.sendall(data)
        return sock.recv(65_536)


MEASUREMENTS = {"stalled": (stalled, 0.005), "burst": (burst, 0.2), "bodies": (bodies, 0.2)}


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serve(float(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*MEASUREMENTS, []], default=list(MEASUREMENTS))
    parser.add_argument("--under", default="", help='what the server is run under, as "taskset -c 0"')
    args = parser.parse_args()
    for name in args.names:
        measure, step_s = MEASUREMENTS[name]
        run = Run(step_s, args.under)
        try:
            uvloop.run(measure(run))
        finally:
            run.process.terminate()
            run.process.wait()


if __name__ == "__main__":
    main()
