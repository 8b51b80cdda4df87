"""The questions, as a command.

    loss        how much worse texts are predicted than by dense attention, by K and cap
    agreement   how well a step knows what the next one wants, by layer, with right drafts and wrong ones
    speed       the same beside tokens a step: from this (n, m) is chosen, n drafts and m verified
    traffic     hits, misses and bytes of the policies, on texts of the model's own
    needles     numbers hidden in a long text, found by a question that is decoded
    copy        passages of a long text, repeated

    tools/eval_sparse.py --out OUT                  all of them: hours on a CPU, for which --device cuda is there
    tools/eval_sparse.py loss needles --quick       whether it works at all, not how well

Each prints a table, and leaves OUT/QUESTION.jsonl, a JSON object for each row, and OUT/QUESTION.png. In bfloat16 a slot
for every block costs nothing either, but the order of pages shows in the last bits.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from minserve.kernels.fp8 import FP8
from minserve.weights.default_model import ensure_default_model, find_draft
from minserve.weights.hub import resolve_model

from .bench import MOST_DRAFTS, Bench
from .looking_ahead import lookahead_policies, measure_agreement
from .loss import measure_loss
from .plots import draw
from .policies import DENSE, Policy
from .recall_tests import Score, copied, measure_recall
from .report import Report, Row
from .texts import CITIES, Task, Texts
from .traffic import measure_traffic, recall_policy, traffic_policies

NUM_DEPTHS = 10


class Sizes(NamedTuple):
    """context: tokens that are read densely; steps: those that are decoded then, of each document.
    slots, cap: K and C of all questions but those that try several; a cap of 0 is none.
    task_context: tokens in which something is hidden; trials, passages: needles and passages at each of `depths`;
    copied: tokens of a passage.
    """

    context: int = 4096
    steps: int = 128
    documents: int = 4
    slots: int = 64
    cap: int = 4
    loss_slots: tuple[int, ...] = (8, 16, 32, 64, 128)
    loss_caps: tuple[int, ...] = (2, 4, 0)
    traffic_caps: tuple[int, ...] = (2, 4, 6)
    task_context: int = 4096
    trials: int = 5
    depths: tuple[float, ...] = tuple((number + 0.5) / NUM_DEPTHS for number in range(NUM_DEPTHS))
    passages: int = 1
    copied: int = 64


QUICK = Sizes(
    context=768,
    steps=10,
    documents=1,
    slots=12,
    cap=2,
    loss_slots=(12,),
    loss_caps=(2,),
    traffic_caps=(2,),
    task_context=320,
    trials=1,
    depths=(0.5,),
    copied=8,
)


class Evaluation:
    """Every question is a method, which returns its rows and their title."""

    def __init__(self, bench: Bench, texts: Texts, sizes: Sizes, drafts: tuple[int, int], quick: bool) -> None:
        """drafts: (n, m) of all questions but those that try several."""
        self._bench, self._sizes, self._quick, self._texts = bench, sizes, quick, texts
        # A text is longer than what is decoded by what a step may be too long.
        length = sizes.context + sizes.steps + MOST_DRAFTS
        self._documents = [texts.document(number, length) for number in range(sizes.documents)]
        self._prompts = [texts.asked(number, sizes.context) for number in range(sizes.documents)]
        drafted = {"lookahead": "draft", "num_drafts": drafts[0], "num_verified": drafts[1]} if bench.has_head else {}
        self._base = Policy(name="base", num_slots=sizes.slots, fetch="adaptive", cap=sizes.cap, **drafted)
        self._looking_ahead: list[Row] | None = None

    def loss(self) -> tuple[str, list[Row]]:
        sizes = self._sizes
        rows = measure_loss(self._bench, self._documents, sizes.context, self._base, sizes.loss_slots, sizes.loss_caps)
        return "Loss above dense, in nats a token; error: of the mean over documents", rows

    def agreement(self) -> tuple[str, list[Row]]:
        if self._looking_ahead is None:
            policies = lookahead_policies(self._base, self._bench.has_head)
            if self._quick:
                policies = [policy for policy in policies if policy.num_drafts <= 1 and policy.num_verified == 0]
            own = (self._documents, self._prompts, self._sizes.context, self._sizes.steps)
            self._looking_ahead = measure_agreement(self._bench, policies, *own)
        return "Agreement with what the next step wants, on given texts and on the model's own", self._looking_ahead

    def speed(self) -> tuple[str, list[Row]]:
        return "Tokens a step, and agreement beside it", self.agreement()[1]

    def traffic(self) -> tuple[str, list[Row]]:
        policies = traffic_policies(self._base, self._sizes.traffic_caps)
        rows = measure_traffic(self._bench, policies, self._prompts, self._sizes.steps)
        return "For a step and one KV head of one layer; bytes and retries: for a step", rows

    def needles(self) -> tuple[str, list[Row]]:
        sizes, texts = self._sizes, self._texts
        tasks = [
            texts.needle(trial * len(sizes.depths) + number, sizes.task_context, depth)
            for trial in range(sizes.trials)
            for number, depth in enumerate(sizes.depths)
        ]
        assert len(sizes.depths) <= len(CITIES)

        def score(task: Task, answer: Sequence[int]) -> float:
            return float(texts.is_answered(task, answer))

        return "Share of needles found; what was moved while the question was decoded", self._recall(tasks, score)

    def copy(self) -> tuple[str, list[Row]]:
        sizes = self._sizes
        tasks = [
            self._texts.copy(number, sizes.task_context, depth, sizes.copied)
            for number in range(sizes.passages)
            for depth in sizes.depths
            if (1 - depth) * sizes.task_context > 4 * sizes.copied  # a passage has to fit behind it
        ]
        return "Share of a passage that was repeated; what was moved meanwhile", self._recall(tasks, copied)

    def _recall(self, tasks: Sequence[Task], score: Score) -> list[Row]:
        base = self._base
        policies = [DENSE, recall_policy(base), replace(base, name="adaptive + retry", retries=True)]
        policies += [replace(base, name=f"fixed {cap}", fetch="fixed", cap=cap) for cap in (4, 2)]
        return measure_recall(self._bench, policies[: 2 if self._quick else None], tasks, score)


SHOWN = {
    "loss": ("policy", "K", "cap", "above_dense", "error", "same_token", "tokens"),
    "agreement": ("policy", "text", "right", "agreement", "when_right", "when_wrong", "worst_layer", "lacking"),
    "speed": ("policy", "text", "tokens_per_step", "agreement", "lacking"),
}
"""The columns of a question's table, where they are not all."""

QUESTIONS = ("loss", "agreement", "speed", "traffic", "needles", "copy")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    sizes = _sizes(args)
    model = resolve_model(args.model) if args.model else ensure_default_model()
    head = find_draft(args.draft, args.model)
    longest = max(sizes.context, sizes.task_context) + max(sizes.steps, 2 * sizes.copied) + MOST_DRAFTS
    host_dtype = FP8 if args.host_kv_dtype == "fp8" else None
    bench = Bench(model, head, longest, args.device, args.dtype, host_dtype)
    texts = Texts(model, None if args.quick else args.texts)
    about = {"model": model.name, "head": head.name if head else None, "device": str(bench.lab.kv.device)}
    about["dtype"] = str(bench.lab.kv.dtype).removeprefix("torch.")
    about["host_dtype"] = str(host_dtype or bench.lab.kv.dtype).removeprefix("torch.")
    for facts in (about, sizes._asdict()):
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
    report, evaluation = Report(args.out, about), Evaluation(bench, texts, sizes, tuple(args.drafts), args.quick)
    for question in args.questions or QUESTIONS:
        began = time.monotonic()
        title, rows = getattr(evaluation, question)()
        report.add(question, f"{question}, {time.monotonic() - began:.0f} s. {title}", rows, SHOWN.get(question, ()))
        if not draw(question, rows, args.out / f"{question}.png"):
            print("no plot: there is no matplotlib here")


def _sizes(args: argparse.Namespace) -> Sizes:
    given = {name: getattr(args, name) for name in ("context", "steps", "documents", "slots", "cap", "trials")}
    given["task_context"] = args.context
    given["passages"] = args.trials
    given["loss_slots"] = None if args.slots is None else (args.slots,)
    return (QUICK if args.quick else Sizes())._replace(**{k: v for k, v in given.items() if v is not None})


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    usual = Sizes()
    add("questions", nargs="*", metavar="QUESTION", help="loss, agreement, ... (default: all)")
    add("--quick", action="store_true", help="short texts, few steps")
    add("--out", type=Path, default=Path(os.environ.get("OUT", "sparse-eval")), metavar="DIR", help="default: $OUT")
    add("--texts", type=Path, default=Path("debian-texts"), metavar="DIR", help="where Debian's packages are unpacked")
    add("--model", help="folder, .gguf or hub name (default: the one that minserve serves without one)")
    add("--draft", help="folder or hub name of a head, or none (default: the default model's own, if it is there)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add(
        "--host-kv-dtype", default="auto", choices=("auto", "fp8"), help="of what a lane fetches (default: as in pages)"
    )
    add("--context", type=int, metavar="TOKENS", help=f"read densely (default {usual.context})")
    add("--steps", type=int, metavar="N", help=f"tokens decoded then (default {usual.steps})")
    add("--documents", type=int, metavar="N", help=f"default {usual.documents}")
    add("--slots", type=int, metavar="K", help=f"default {usual.slots}, and of loss several")
    add("--cap", type=int, metavar="C", help=f"what adaptive lanes fetch on average (default {usual.cap})")
    add("--drafts", type=int, nargs=2, default=(1, 0), metavar=("N", "M"), help="proposed, and verified (default 1 0)")
    add("--trials", type=int, metavar="N", help=f"needles and passages at each depth (default {usual.trials})")
    args = parser.parse_args(argv)
    if not 0 <= args.drafts[1] <= args.drafts[0] <= MOST_DRAFTS or args.drafts[0] == 0:
        parser.error(f"--drafts: 1 to {MOST_DRAFTS} are proposed, and no more verified than that")
    if unknown := set(args.questions) - set(QUESTIONS):
        parser.error(f"there is no question {', '.join(sorted(unknown))}; there are {', '.join(QUESTIONS)}")
    return args
