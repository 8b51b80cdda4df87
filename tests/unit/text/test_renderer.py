import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minserve.errors import RequestError
from minserve.text.chat import ChatTemplate
from minserve.text.processes import NUM_PROCESSES
from minserve.text.renderer import Renderer

USER = {"role": "user", "content": "Hi"}


def children() -> set[int]:
    """The ids of this process's children."""
    threads = Path("/proc/self/task").iterdir()
    return {int(pid) for thread in threads for pid in (thread / "children").read_text().split()}


@pytest.fixture
def new_children():
    """new_children() -> those that this test has begun; fixtures of other tests may keep some of theirs."""
    before = children()
    return lambda: children() - before


@pytest.fixture
def start():
    """start(source) -> a renderer of one template."""
    renderers = []

    def begin(source, **options):
        renderers.append(Renderer(ChatTemplate({"default": source}, {"bos_token": "<s>"}), **options))
        return renderers[-1]

    yield begin
    for renderer in renderers:
        renderer.close()


async def test_a_chat_is_rendered_as_the_template_itself_would(start):
    source = "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson }}{{ add_generation_prompt }}{{ x }}"
    renderer = start(source)
    chat = {"messages": [USER], "tools": [{"n": 10**40, "f": 1e-7}], "template_kwargs": {"x": "é\u2028\n"}}
    assert await renderer.render(chat) == renderer.template.render(**chat)


async def test_what_the_template_objects_to_keeps_its_field_and_words(start):
    renderer = start("{{ raise_exception('no ' ~ messages[0].content) }}")
    with pytest.raises(RequestError, match="no Hi") as caught:
        await renderer.render({"messages": [USER]})
    assert caught.value.param == "messages"
    with pytest.raises(RequestError) as caught:
        await renderer.render({"messages": [USER], "template_kwargs": {"tools": []}})
    assert caught.value.param == "chat_template_kwargs.tools"


async def test_half_of_a_surrogate_pair_is_refused(start):
    with pytest.raises(RequestError, match="surrogate"):
        await start("{{ messages[0].content }}").render({"messages": [{"role": "user", "content": "\ud83d"}]})


async def test_a_chat_without_end_takes_its_process_with_it_and_the_next_gets_a_new_one(start):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    renderer = start("{% if messages[0].content == 'loop' %}" + loops + "{% endif %}ok", max_cpu_s=0.2)
    for _ in range(3):
        with pytest.raises(RequestError, match=r"0\.2 s"):
            await renderer.render({"messages": [{"role": "user", "content": "loop"}]})
        assert await renderer.render({"messages": [USER]}) == "ok"


async def test_time_is_counted_for_each_chat_alone(start):
    work = "{% for i in range(99999) %}{% endfor %}ok"
    renderer = start(work, max_cpu_s=0.5)
    assert [await renderer.render({"messages": [USER]}) for _ in range(150)] == ["ok"] * 150


async def test_processes_that_were_killed_are_replaced(start, new_children):
    renderer = start("ok")
    assert await renderer.render({"messages": [USER]}) == "ok"
    killed = new_children()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert await renderer.render({"messages": [USER]}) == "ok"
    assert new_children().isdisjoint(killed)


def test_a_process_ends_with_its_input():
    command = [sys.executable, "-m", "minserve.text.render_process"]
    setup = b'{"templates": {}, "special_tokens": {}, "max_cpu_s": 1}\n'
    for given in (b"", setup, setup + b'{"messages": '):
        done = subprocess.run(command, input=given, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_they_are_all_there_before_the_first_burst_and_closing_leaves_none(start, new_children):
    renderer = start("ok")
    assert len(new_children()) == NUM_PROCESSES
    renderer.close()
    assert new_children() == set()
