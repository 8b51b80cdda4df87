"""Signals keep the order of a step's halves, however these are launched.

An engine on a CPU launches its steps, and what its signals and numbers of launches do is written down, stream by
stream, as a GPU would be given it: recorded steps are captured and replayed. Then all of it happens again, many times,
with the streams as far apart as chance will have it. A wait must not end before that record has happened which was
launched last before it; and all streams come to their ends, also if the device has but one queue for all of them.
"""

import random
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from minserve.engine.plan import StepPlan
from minserve.lookahead import launches, order
from minserve.lookahead.launches import Launches
from minserve.lookahead.order import Order
from minserve.lookahead.pipeline import Lookahead
from minserve.runner.decode import StepKind
from minserve.runner.graphs import DecodeGraphs
from tests.engine.heads import write_head
from tests.engine.tiny import CONFIG, VOCAB, finish, submit, tiny_engine

MODEL = {**CONFIG, "num_hidden_layers": 3}
LANES = 4


class Device:
    """What has been launched: (stream, operation, for a wait: the record that it has to wait for)."""

    def __init__(self):
        self.launched, self.cells, self.last = [], [], {}
        self.stream, self.captured = "foreground", None

    def launch(self, name, *operands):
        if self.captured is not None:
            self.captured.append((name, operands))
            return
        awaited = self.last.get(operands[0]) if name == "wait" else None
        self.launched.append((self.stream, name, operands, awaited))
        if name == "record":
            self.last[operands[0]] = len(self.launched) - 1

    @contextmanager
    def capturing(self):
        self.captured = []
        yield self.captured
        self.captured = None

    def cell(self):
        self.cells.append(Cell(self))
        return self.cells[-1]


class Cell:
    """A number in the device's memory."""

    def __init__(self, device):
        self.device, self.value = device, 0

    def fill_(self, value):
        self.device.launch("fill", self, value)


class Streams(order._OneAfterTheOther):
    def __init__(self, device):
        self.device = device

    @contextmanager
    def background(self):
        self.device.stream = "background"
        yield
        self.device.stream = "foreground"


class Captured:
    """Recorded work: computed again when it is replayed, but what it launches is what was captured."""

    def __init__(self, device, function):
        self.device, self.function = device, function
        function()
        with device.capturing() as self.operations:
            function()

    def replay(self):
        with self.device.capturing():
            self.function()
        for name, operands in self.operations:
            self.device.launch(name, *operands)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    stand_in = SimpleNamespace(
        zeros=lambda *_, **__: device.cell(),
        zeros_like=lambda _: device.cell(),
        cuda=SimpleNamespace(is_current_stream_capturing=lambda: device.captured is not None),
        int64=torch.int64,
    )
    monkeypatch.setattr(launches, "torch", stand_in)
    monkeypatch.setattr(launches, "record_flag", lambda *operands: device.launch("record", *operands))
    monkeypatch.setattr(launches, "wait_for_flag", lambda *operands: device.launch("wait", *operands))
    monkeypatch.setattr(order, "_CudaStreams", lambda _: Streams(device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return device


class Violation(Exception):
    pass


def happen(device, choose):
    """All of it, from the beginning. choose: the stream that goes on, of those that can."""
    for cell in device.cells:
        cell.value = 0
    queues = {stream: [] for stream, *_ in device.launched}
    for number, (stream, *_) in enumerate(device.launched):
        queues[stream].append(number)
    at, done = dict.fromkeys(queues, 0), set()
    while True:
        heads = {stream: queue[at[stream]] for stream, queue in queues.items() if at[stream] < len(queue)}
        able = {stream: number for stream, number in heads.items() if can(device.launched[number])}
        if not heads:
            return
        if not able:
            raise Violation("all streams wait for ever")
        stream = choose(able)
        do(device.launched[able[stream]], done)
        done.add(able[stream])
        at[stream] += 1


def can(launched):
    _, name, operands, _ = launched
    return name != "wait" or operands[0].value >= operands[1].value


def do(launched, done):
    _, name, operands, awaited = launched
    if name == "fill":
        operands[0].value = operands[1]
    elif name == "record":
        if operands[0].value >= operands[1].value:
            raise Violation("a number is recorded twice")
        operands[0].value = operands[1].value
    if awaited is not None and awaited not in done:
        raise Violation("a wait has ended too early")


def launched_by_an_engine(folder, device, *, recorded, num_drafts=0):
    """Has an engine launch steps of all sorts."""
    options = {"draft_path": str(write_head(folder / "head")), "num_draft_tokens": num_drafts} if num_drafts else {}
    options |= {"sparse": "above", "sparse_above": 40, "host_kv": 2**22, "working_set_blocks": 3, "run_ahead": 1}
    engine = tiny_engine(folder, MODEL, max_num_seqs=LANES, max_num_batched_tokens=24, **options)
    runner = engine._runner
    sets = runner._steps.lookahead.sets
    halves = Order.of(torch.device("cuda"), len(sets.kv))
    lookahead = Lookahead(sets, recalls=False, max_entries=LANES, order=halves, layers_at_once=1)
    runner._steps.lookahead = lookahead
    if recorded:
        record = lambda function: Captured(device, function)  # noqa: E731
        sizes = {"max_lanes": LANES, "most_drafts": num_drafts, "vocab_size": VOCAB}
        runner._decode = DecodeGraphs(
            runner._decode, record, record, dtype=torch.float32, device=torch.device("cpu"), **sizes
        )
        # The others are recorded between steps.
        runner._decode.capture([StepKind(num_drafts, num_drafts, keeps_queries=True)], lambda *_: None)
    rng = random.Random(3)
    requests = [(20, 5), (75, 14), (10, 30), (95, 20), (130, 9), (60, 25), (30, 3)]
    prompts = [[rng.randrange(VOCAB) for _ in range(size)] for size, _ in requests]
    finish(engine, *(submit(str(number), prompts[number], max_tokens=requests[number][1]) for number in range(4)))
    finish(engine, *(submit(str(number), prompts[number], max_tokens=requests[number][1]) for number in range(4, 7)))
    runner.run(StepPlan(step=0))  # of nobody
    assert sum(name == "wait" for _, name, *_ in device.launched) > 300


def every_way(device, runs=50):
    """Each stream as far ahead as it can be, and as chance has it."""
    for seed in range(runs):
        rng, ahead = random.Random(seed), ["foreground", "background"][:: 1 if seed % 2 else -1]

        def choose(able, rng=rng, ahead=ahead, seed=seed):
            if seed > 1 and rng.random() < 0.05:
                rng.shuffle(ahead)
            return next(stream for stream in ahead if stream in able)

        happen(device, choose)


def in_one_queue(device):
    """As launched: nothing waits for what is launched later."""
    numbers = iter(range(len(device.launched)))

    def choose(able):
        number = next(numbers)
        if number not in able.values():
            raise Violation(f"{device.launched[number]} waits for what is launched later")
        return device.launched[number][0]

    happen(device, choose)


@pytest.mark.parametrize(("recorded", "num_drafts"), [(True, 0), (True, 2), (False, 2)])
def test_no_wait_ends_early_and_all_of_them_end(tmp_path, device, recorded, num_drafts):
    launched_by_an_engine(tmp_path, device, recorded=recorded, num_drafts=num_drafts)
    in_one_queue(device)
    every_way(device)


def uncounted_replays(self, real=Launches.foreground):
    if sys._getframe(2).f_code.co_name != "run":
        real(self)


def one_number_for_all(self):
    self._num_foregrounds = 1
    self._foreground.fill_(1)


@contextmanager
def sampling_is_not_told(self, stream):
    self._num_backgrounds += 1
    with stream:
        self._background.fill_(self._num_backgrounds)
        self._last_foreground.fill_(self._num_foregrounds)
        yield


@contextmanager
def told_on_the_wrong_stream(self, stream):
    self._num_backgrounds += 1
    self._background.fill_(self._num_backgrounds)
    self._last_foreground.fill_(self._num_foregrounds)
    with stream:
        yield
    self._last_background.fill_(self._num_backgrounds)


@contextmanager
def awaits_the_foreground_before(self, stream):
    self._num_backgrounds += 1
    with stream:
        self._background.fill_(self._num_backgrounds)
        self._last_foreground.fill_(self._num_foregrounds - 1)
        yield
    self._last_background.fill_(self._num_backgrounds)


def begins_without_an_end(self):
    self.order.foreground()
    self.background.given[0].fill_(-1)
    self.order.begun.record()


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "found"),
    [
        (Launches, "foreground", uncounted_replays, "twice|early"),
        (Launches, "foreground", one_number_for_all, "twice|early"),
        (Launches, "background", sampling_is_not_told, "early"),
        (Launches, "background", told_on_the_wrong_stream, "twice|early|for ever"),
        (Launches, "background", awaits_the_foreground_before, "early"),
        (Lookahead, "forget", begins_without_an_end, "for ever"),
    ],
)
def test_mistakes_are_found(tmp_path, device, monkeypatch, owner, name, mistake, found):
    monkeypatch.setattr(owner, name, mistake)
    launched_by_an_engine(tmp_path, device, recorded=True)
    with pytest.raises(Violation, match=found):
        every_way(device)
