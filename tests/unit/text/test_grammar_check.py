"""Grammars are tried in processes of their own, which are there only when there is something to try."""

import json
import os
import signal
import subprocess
import sys

import pytest

from minserve.errors import RequestError
from minserve.grammar import BYTES
from minserve.text import grammars
from minserve.text.grammar_check import GrammarCheck
from tests.unit.text.test_renderer import children

WORD = grammars.alone(grammars.regex_part("[a-z]+"))
RULES = ["start: R0", *(f'R{n}: "a" R{n + 1}' for n in range(4000)), 'R4000: "b"']
CHAIN = grammars.alone(grammars.grammar_part("\n".join(RULES)))


@pytest.fixture
def check():
    check = GrammarCheck(lambda: BYTES)
    yield check
    check.close()


async def test_a_process_is_started_for_the_first_grammar_and_ends_with_the_check(check):
    before = children()
    check.close()
    check = GrammarCheck(lambda: BYTES)
    assert children() == before
    assert await check.check(WORD, "regex") == WORD
    assert len(children() - before) == 1
    check.close()
    assert children() == before


async def test_a_grammar_that_overflows_the_stack_is_refused_and_the_next_one_is_tried(check):
    for _ in range(2):
        with pytest.raises(RequestError, match="nested too deeply") as caught:
            await check.check(CHAIN, "structured_outputs.grammar")
        assert caught.value.param == "structured_outputs.grammar"
    assert await check.check(WORD, "regex") == WORD


async def test_a_process_that_was_killed_is_replaced(check):
    before = children()
    await check.check(WORD, "regex")
    [pid] = children() - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert await check.check(grammars.alone(grammars.choice_part(["x"])), "choice")


async def test_a_grammar_in_another_notation_is_given_back_as_the_engine_takes_it(check):
    given = await check.check(grammars.alone(grammars.grammar_part('root ::= "a" | "b"')), "grammar")
    [part] = json.loads(given)["grammars"]
    assert part["lark_grammar"].split()[-4:] == ["start:", '"a"', "|", '"b"']


def test_a_process_ends_with_its_input():
    command = [sys.executable, "-m", "minserve.text.grammar_process"]
    setup = b'{"max_cpu_s": 1, "tokens": ["a", "b"], "special_token_ids": [], "end_token_ids": []}\n'
    for given in (b"", setup, setup + b'"{'):
        done = subprocess.run(command, input=given, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
