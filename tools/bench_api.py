#!/usr/bin/env python3
"""What the API's process delivers from one core: the real HTTP server over a scripted engine that generates so many
tokens a second, and beside it a plain aiohttp server that writes constant chunks at the same rate to as many clients.

    PYTHONPATH=. taskset -c 1 tools/bench_api.py --under "taskset -c 0"

Clients are in processes of their own; the server has a core for itself if --under says so. The scripted engine's deltas
are encoded and decoded in every step as if they came from an engine's process. Where a server falls behind, the real
one puts tokens that wait into one event. Wanted: at least half of what the plain one delivers.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web
from http_clients import Clients
from streams import Figures

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the tests' own servers

from minserve.api.server import Server, bind
from minserve.api.service import Service
from minserve.config import ServerConfig
from minserve.engine.client import joined
from minserve.protocol import Delta, Outputs, Stats, Submit
from minserve.text.renderer import Renderer
from tests.api import tiny
from tests.api.fake_engine import FakeEngine

PROMPT = [5, 6, 7, 8]
SIDES = ("plain", "minserve")


class SteppedEngine(FakeEngine):
    """A token of every request in each step, as from an engine's process."""

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        self.queues[submit.request_id] = queue
        self.left[submit.request_id] = submit.params.max_tokens
        try:
            while True:
                waiting: list[Delta | None] = [await queue.get()]
                while not queue.empty():
                    waiting.append(queue.get_nowait())
                for delta in joined(waiting):
                    assert delta is not None
                    yield delta
                    if delta.finish_reason is not None:
                        return
        finally:
            del self.queues[submit.request_id]

    async def run_steps(self, num_streams: int, step_s: float) -> None:
        """From the moment on at which so many requests have come."""
        self.queues: dict[str, asyncio.Queue[Delta]] = {}
        self.left: dict[str, int] = {}
        decoder = msgspec.msgpack.Decoder(Outputs)
        [token_id] = self.tokenizer.encode("x", add_special_tokens=False)
        while True:
            while len(self.queues) < num_streams:
                await asyncio.sleep(0.01)
            due = asyncio.get_running_loop().time()
            while self.left:
                deltas = [self._next(request_id, token_id) for request_id in list(self.left)]
                message = msgspec.msgpack.encode(Outputs(deltas=deltas, stats=Stats()))
                for delta in decoder.decode(message).deltas:
                    self.queues[delta.request_id].put_nowait(delta)
                due += step_s
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

    def _next(self, request_id: str, token_id: int) -> Delta:
        self.left[request_id] -= 1
        if self.left[request_id]:
            return Delta(request_id=request_id, token_ids=[token_id])
        del self.left[request_id]
        return Delta(request_id=request_id, token_ids=[token_id], finish_reason="length")


async def serve_minserve(num_streams: int, step_s: float) -> None:
    """The server's process: prints its port."""
    with tempfile.TemporaryDirectory() as name:
        tokenizer, template = tiny.load(tiny.write_model_folder(Path(name)))
        engine = SteppedEngine(tokenizer, max_model_len=100_000, max_num_seqs=num_streams)
        stepping = asyncio.create_task(engine.run_steps(num_streams, step_s))
        config = ServerConfig(model_path=name, served_model_names=("tiny",), max_num_waiting=num_streams)
        sock = bind("127.0.0.1", 0)
        with closing(Renderer(template)) as renderer:
            server = Server(Service(config, engine, tokenizer, renderer), sock)
            await server.start()
            print(sock.getsockname()[1], flush=True)
            await server.run()
        stepping.cancel()


async def serve_plain(num_streams: int, step_s: float) -> None:
    """The same with nothing between the clock and the socket."""
    event = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "x", "choices": [{"text": "x"}]}
    chunk = b"data: " + msgspec.json.encode(event) + b"\n\n"
    all_here = asyncio.Event()
    num_here = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_here
        num_tokens = (await request.json())["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_here += 1
        if num_here % num_streams == 0:
            all_here.set()
        await all_here.wait()
        due = asyncio.get_running_loop().time()
        for _ in range(num_tokens):
            await response.write(chunk)
            due += step_s
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        await response.write(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % num_tokens)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    sock = bind("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    print(sock.getsockname()[1], flush=True)
    await asyncio.Event().wait()


def measure(side: str, args: argparse.Namespace) -> tuple[Figures, float, float]:
    """(figures of the streams, share of a core that the server took, the same of the busiest client process)."""
    step_s = args.clients / args.rate
    command = [*args.under.split(), sys.executable, __file__, "--serve", side]
    command += ["--clients", str(args.clients), "--rate", str(args.rate)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    clients = Clients(f"http://127.0.0.1:{int(process.stdout.readline())}", args.processes)
    try:
        before = core_s(process.pid)
        num_tokens = max(2, int(args.seconds / step_s))
        streams, busiest = clients.run([PROMPT] * args.clients, num_tokens)
        took_s = max(max(stream.events_s) for stream in streams) - min(stream.sent_s for stream in streams)
        return Figures.of(streams), (core_s(process.pid) - before) / took_s, busiest
    finally:
        clients.close()
        process.terminate()
        process.wait()


def core_s(pid: int) -> float:
    """Seconds that a process's main thread has had a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rate", type=float, default=20_000, help="tokens that are generated in a second (default 20000)")
    add("--clients", type=int, default=256, metavar="N")
    add("--processes", type=int, default=4, metavar="N", help="of clients")
    add("--seconds", type=float, default=10.0)
    add("--under", default="", help='what the servers are run under, as "taskset -c 0"')
    add("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(
            {"plain": serve_plain, "minserve": serve_minserve}[args.serve](args.clients, args.clients / args.rate)
        )
        return
    print(f"{args.clients} clients in {args.processes} processes, {args.rate:,.0f} tokens a second offered")
    delivered = []
    for side in SIDES:
        figures, share, busiest = measure(side, args)
        delivered.append(figures.tokens_per_s)
        print(
            f"{side:9} {figures.tokens_per_s:8,.0f} tokens/s, {figures.tokens_per_event:.2f} in an event; gaps p50 "
            f"{figures.gap_p50_ms:.1f} ms, p99 {figures.gap_p99_ms:.1f}; {share:.0%} of a core, a client {busiest:.0%}"
        )
    print(f"{delivered[1] / delivered[0]:.2f}x of the plain one")


if __name__ == "__main__":
    main()
