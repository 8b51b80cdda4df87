"""Many requests within a second from one thread, each on a connection of its own, and when the kernel saw the answers.

A refusal's time is from the moment the request's last byte was handed to the kernel to the moment the kernel took in
the answer's first one (SO_TIMESTAMPNS). So it is the server's, and no fault of a client that came to read it late.
"""

import select
import socket
import struct
import time
from typing import NamedTuple

SO_TIMESTAMPNS = 35
"""Linux's number, which the socket module lacks."""

_TIMESPEC = struct.Struct("qq")


class Answer(NamedTuple):
    """status: of HTTP. seconds: until its first byte. late_s: how much later than that the client read it."""

    status: int
    seconds: float
    late_s: float


class _Open:
    """A connection whose answer is not whole yet."""

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self.sock.connect(address)
        self.data = b""
        self.seconds = self.late_s = 0.0
        self.sock.sendall(request)
        self.sent_ns = time.time_ns()
        self.sock.setblocking(False)

    def read(self) -> bool:
        """Take in what has come; whether that was the end."""
        data, told, _, _ = self.sock.recvmsg(65_536, 256)
        if not self.data and data:
            now_ns = time.time_ns()
            stamps = [_TIMESPEC.unpack_from(item) for _, kind, item in told if kind == SO_TIMESTAMPNS]
            came_ns = stamps[0][0] * 10**9 + stamps[0][1] if stamps else now_ns
            self.seconds, self.late_s = (came_ns - self.sent_ns) / 1e9, (now_ns - came_ns) / 1e9
        self.data += data
        return not data


def burst(address: tuple[str, int], request: bytes, number: int, seconds: float) -> tuple[list[Answer], float]:
    """Send `number` requests evenly within so many seconds; all answers, and the seconds that the sending took."""
    answers: list[Answer] = []
    waiting: dict[int, _Open] = {}
    poll = select.epoll()

    def read_all(timeout_s: float) -> None:
        for file, _ in poll.poll(timeout_s):
            one = waiting[file]
            if one.read():
                del waiting[file]
                poll.unregister(file)
                one.sock.close()
                answers.append(Answer(int(one.data.split(maxsplit=2)[1]), one.seconds, one.late_s))

    stamping = socket.socket()
    stamping.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    time.sleep(0.1)  # the kernel begins a little after the first one asks, and ends with the last
    begin = time.monotonic()
    for index in range(number):
        while (left_s := begin + index * seconds / number - time.monotonic()) > 0:
            read_all(left_s)
        one = _Open(address, request)
        waiting[one.sock.fileno()] = one
        poll.register(one.sock, select.EPOLLIN)
    took_s = time.monotonic() - begin
    while waiting:
        read_all(60.0)
    poll.close()
    stamping.close()
    return answers, took_s
