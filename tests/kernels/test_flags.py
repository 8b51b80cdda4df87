"""Records and waits of flags. That a wait waits is tested on a GPU alone: here nothing else would ever run."""

from dataclasses import replace

import pytest
import torch

from minserve.kernels.flags import record_flag, wait_for_flag

interpreter = pytest.importorskip("triton.runtime.interpreter")


def numbers(device, *values):
    return [torch.tensor([value], device=device) for value in values]


def test_a_record_leaves_its_number_and_who_waits_for_it_or_an_earlier_one_passes(device):
    flag, first, second, later = numbers(device, 0, 2, 3, 2**40)
    wait_for_flag(flag, flag.clone())
    record_flag(flag, first)
    wait_for_flag(flag, first)
    assert flag.item() == 2
    record_flag(flag, later)
    wait_for_flag(flag, second)
    wait_for_flag(flag, later)
    assert flag.item() == 2**40


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it would be the last that the process does on the GPU")
@pytest.mark.parametrize("again", [7, 6])
def test_a_number_that_does_not_rise_is_our_mistake(again, device, monkeypatch):
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))  # as the kernel asks for
    flag, first, second = numbers(device, 0, 7, again)
    record_flag(flag, first)
    with pytest.raises(Exception, match="recorded twice"):
        record_flag(flag, second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_stream_wrote_before_a_record_is_there_behind_a_wait_on_another(device):
    flag, number = numbers(device, 0, 0)
    found, written = torch.zeros(2, 2**20, dtype=torch.int32, device=device)
    writer = torch.cuda.Stream()
    for value in range(1, 200):
        torch.cuda.synchronize()
        number.fill_(value)
        torch.cuda.synchronize()
        with torch.cuda.stream(writer):
            torch.cuda._sleep(20_000)
            written.fill_(value)
            record_flag(flag, number)
        wait_for_flag(flag, number)
        found.copy_(written)
        assert (found == value).all()
