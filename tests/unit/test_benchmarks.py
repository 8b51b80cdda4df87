"""The benchmarks' arithmetic, on numbers that can be checked by hand."""

import argparse
import os
import sys
from pathlib import Path

import pytest

from minserve.text.tokenizer import Tokenizer
from tools.gpu_trace import Ran, idle_of, stream_table
from tools.streams import Figures, Stream, quantile, tokens_between
from tools.workload import (
    SHAPES,
    ChildError,
    Timing,
    Work,
    add_flags,
    as_flags,
    engine_options,
    measure,
    parse,
    reports,
    side_flags,
    warm_up_of,
    write_config,
    write_tokenizer,
)

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def child(code):
    """What a process reports that runs this code, with the benchmarks' shared module as w."""
    return reports([sys.executable, "-c", f"import tools.workload as w; {code}"], ENVIRONMENT)


def parsed(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["bench", *flags])
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parse(parser)


@pytest.mark.parametrize(("text", "work"), [("8x16384", Work(8, 16384, 129)), ("1x64x9", Work(1, 64, 9))])
def test_a_work_is_requests_context_and_new_tokens(text, work):
    assert Work.parse(text) == work
    assert Work.parse(str(work)) == work


@pytest.mark.parametrize("text", ["", "8", "8x", "0x64", "8x64x1", "8x64x9x9", "8x-64"])
def test_what_is_no_work_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        Work.parse(text)


def test_prompts_repeat_with_their_seed_and_stay_below_the_last_ids():
    work = Work(3, 50)
    prompts = work.prompts(1000, seed=1)
    assert prompts == work.prompts(1000, seed=1) != work.prompts(1000, seed=2)
    assert [len(prompt) for prompt in prompts] == [50, 50, 50]
    assert max(map(max, prompts)) < 980


def test_a_step_is_the_time_of_the_tokens_after_the_first():
    timing = Timing(Work(4, 100, 11), first_s=2.0, whole_s=3.0)
    assert timing.step_ms == 100
    assert timing.decode_rate == 40
    assert timing.prefill_rate == 200


def test_a_work_is_warmed_up_before_it_is_measured(monkeypatch):
    served = []
    args = parsed(monkeypatch, "--config", "tiny", "--warm-context", "8", "--repeats", "2")

    def serve(prompts, new_tokens):
        served.append((len(prompts), len(prompts[0]), new_tokens))
        return float(new_tokens)

    timing = measure(serve, Work(4, 32, 16), args)
    assert served == [(4, 8, 5), (4, 32, 16), (4, 32, 16), (4, 32, 1), (4, 32, 1)]
    assert (timing.first_s, timing.whole_s) == (1.0, 16.0)


def test_a_warm_up_lasts_until_all_requests_decode_at_once(monkeypatch):
    args = parsed(monkeypatch, "--work", "256x1024", "--max-num-batched-tokens", "1024")
    # 256 x 512 prompt tokens, 1024 a step beside the decodes.
    assert warm_up_of(args.work[0], args) == Work(256, 512, 129)
    assert warm_up_of(Work(256, 1024, 500), args).new_tokens == 128 + 1 + 4


def test_flags_make_another_process_run_the_same(monkeypatch):
    flags = ["--config", "tiny", "--work", "1x8x3", "2x16x4", "--kv-cache-memory", "1e6", "--quantization", "fp8"]
    args = parsed(monkeypatch, *flags)
    assert vars(parsed(monkeypatch, *side_flags(args))) == vars(args)
    assert engine_options(args)["kv_cache_memory"] == 1_000_000


def test_options_that_not_every_version_has_are_passed_on_only_when_given(monkeypatch):
    assert "quantization" not in engine_options(parsed(monkeypatch, "--config", "tiny"))
    assert engine_options(parsed(monkeypatch, "--enforce-eager"))["enforce_eager"] is True


def test_options_as_a_command_line():
    options = {"a_b": 1, "none": None, "off": False, "on": True, "many": ["x", 2]}
    assert as_flags(options) == ["--a-b", "1", "--on", "--many", "x", "2"]


def test_a_work_that_the_engine_cannot_take_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--config", "tiny", "--work", "1x1000x100")
    assert "1x1000x100 is over --max-model-len 1024" in capsys.readouterr().err


def test_reports_of_another_process_are_told_from_what_it_prints(capfd):
    assert [fields for _, fields in child("print('noise'); w.report(a=[1, 2]); w.report(b=3)")] == [
        {"a": [1, 2]},
        {"b": 3},
    ]
    assert "noise" in capfd.readouterr().err


def test_a_process_that_fails_is_told_after_its_reports():
    reported = child("w.report(a=1); exit(3)")
    assert next(reported)[1] == {"a": 1}
    with pytest.raises(ChildError, match="status 3"):
        next(reported)


def test_every_id_of_the_tokenizer_is_text_of_its_own(tmp_path):
    write_config(tmp_path, "tiny")
    vocab_size = SHAPES["tiny"].config["vocab_size"]
    write_tokenizer(tmp_path, vocab_size)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.token_id_ranges == ((0, vocab_size),)
    texts = [tokenizer.token_text(token_id) for token_id in range(vocab_size)]
    assert all(texts)
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.95, 4), (1.0, 4)])
def test_a_quantile_is_one_of_the_values(share, value):
    assert quantile([3, 1, 4, 2], share) == value


def test_tokens_are_counted_where_all_streams_run():
    streams = [
        Stream(sent_s=0.0, events_s=[1.0, 2.0, 3.0, 4.0], num_tokens=4),
        Stream(sent_s=0.0, events_s=[2.0, 4.0, 6.0], num_tokens=6),
    ]
    figures = Figures.of(streams)
    # From 2 to 4: two tokens of the first, and one event of two tokens of the second.
    assert (figures.window_s, figures.tokens_per_s) == (2.0, 2.0)
    assert tokens_between(streams[1], 2.0, 4.0) == 2
    assert (figures.ttft_p50_ms, figures.ttft_p95_ms) == (1000, 2000)
    assert (figures.gap_p50_ms, figures.gap_p99_ms) == (1000, 2000)
    assert figures.tokens_per_event == pytest.approx(10 / 7)


def test_streams_that_never_run_together_have_no_rate():
    with pytest.raises(ValueError, match="more new tokens"):
        Figures.of([Stream(0.0, [1.0, 2.0], 2), Stream(0.0, [3.0, 4.0], 2)])


def test_idle_is_what_no_kernel_covers():
    # Busy 0-10, 12-20 (a kernel within another, and one that overlaps), 50-100: gaps of 2 and 30.
    idle = idle_of([(50.0, 100.0), (0.0, 10.0), (12.0, 18.0), (13.0, 14.0), (17.0, 20.0)])
    assert idle.span_us == 100
    assert idle.idle == pytest.approx(0.32)
    assert idle.between_steps == pytest.approx(0.30)


def test_kernels_are_told_by_stream_with_what_they_waited_for():
    ran = [Ran(7, "a", 0, 10), Ran(9, "copy", 0, 4), Ran(7, "b", 30, 35), Ran(7, "a", 36, 46), Ran(7, "b", 46, 51)]
    table = stream_table(ran, num_steps=2).splitlines()[2:]
    assert table == [
        "| 7 | b | 1.0 | 5.0 | 10.0 | 20.0 |",
        "| 7 | a | 1.0 | 10.0 | 0.5 | 1.0 |",
        "| 9 | copy | 0.5 | 2.0 | 0.0 | 0.0 |",
    ]
