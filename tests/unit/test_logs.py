"""Lines of the log for machines."""

import json
import logging

from minserve.logs import JsonFormatter


def formatted(message, *args, exc_info=None, **extra):
    record = logging.getLogger("minserve").makeRecord(
        "minserve.access", logging.INFO, "file.py", 1, message, args, exc_info, extra=extra
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    return json.loads(line)


def test_a_line_is_an_object_with_what_was_given_beside_the_message():
    line = formatted("%s took %d ms", "it", 5, ms=5, status="200")
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "minserve.access",
        "message": "it took 5 ms",
        "ms": 5,
        "status": "200",
    }


def test_what_would_break_a_line_does_not():
    assert formatted("a\nb\u2028\ud83d")["message"].startswith("a\nb")


def test_an_exception_is_a_member():
    try:
        raise ValueError("why")
    except ValueError as error:
        line = formatted("failed", exc_info=(ValueError, error, error.__traceback__))
    assert "ValueError: why" in line["exception"]


def test_what_json_cannot_say_is_told_as_python_shows_it():
    assert formatted("x", thing={1, 2}.__class__)["thing"] == "<class 'set'>"
