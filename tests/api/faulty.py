"""The real command, but its device fails under an engine that is at work.

    python -m tests.api.faulty FAULT [flags of minserve]

The fault is planted in the engine's process, which is this module too, in the step after NUM_STEPS that decode.
"""

import asyncio
import os
import sys
from unittest.mock import patch

NUM_STEPS = 10
ENGINE, VARIABLE = "minserve.engine.process", "MINSERVE_TESTS_FAULT"

FAULTS = {
    "memory": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "launch": "CUDA error: an illegal memory access was encountered",
    "result": "CUDA error: device-side assert triggered",
}
"""By the moment at which the host hears of it: what is wrong in a kernel may be told when its results are awaited."""


def plant(fault: str) -> None:
    """Let every step fail from some time on: what a device has once said, it says again."""
    import torch

    from minserve.runner.runner import Runner, RunningStep

    run, result, num_steps = Runner.run, RunningStep.result, 0
    kind = torch.OutOfMemoryError if fault == "memory" else torch.AcceleratorError

    def failing_run(self, plan):
        nonlocal num_steps
        num_steps += bool(plan.decodes)
        if num_steps > NUM_STEPS and fault != "result":
            raise kind(FAULTS[fault])
        return run(self, plan)

    def failing_result(self):
        if num_steps > NUM_STEPS and fault == "result":
            raise kind(FAULTS[fault])
        return result(self)

    Runner.run, RunningStep.result = failing_run, failing_result


def run_command(fault: str) -> int:
    from minserve.cli import main

    spawn = asyncio.create_subprocess_exec

    def spawn_faulty(*command, **options):
        here = [__spec__.name if part == ENGINE else part for part in command]
        return spawn(*here, **options | {"env": options["env"] | {VARIABLE: fault}})

    with patch.object(asyncio, "create_subprocess_exec", spawn_faulty):
        return main(sys.argv[2:])


if __name__ == "__main__":
    if VARIABLE not in os.environ:
        sys.exit(run_command(sys.argv[1]))
    from minserve.engine.process import main as run_engine

    plant(os.environ[VARIABLE])
    run_engine()
