"""The training of a head: steps, schedule, checkpoints, and how often it agrees with its target.

Owns: the loop and what it leaves on disk. Does not know: where texts come from, or the engine.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from minserve.models.eagle3 import Eagle3Head

from .answers import Text
from .attention import ChainMasks
from .examples import Batch, batches, collate
from .head import Unrolled, unroll
from .loss import soft_cross_entropy, target_probabilities
from .target import Target

WARM_UP = 0.03
FLOOR = 0.01
SAVE_EVERY_S = 30.0
LOG_EVERY = 50
MEASURE_EVERY = 0.2
"""Of the whole training."""

BAR = "{percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.95), 0.01, 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """seconds or steps: how long; one of them. unroll: drafts of each chain; decay: what a draft weighs against the one
    before it. temperature: at which both distributions are compared: below 1 what is hardly ever sampled counts less.
    prompt_weight, document_share: see `examples`."""

    seconds: float | None = None
    steps: int | None = None
    batch_tokens: int = 16384
    unroll: int = 5
    decay: float = 0.8
    temperature: float = 1.0
    learning_rate: float = 1e-3
    prompt_weight: float = 0.1
    document_share: float = 0.35
    seed: int = 0

    def progress(self, step: int, seconds: float) -> float:
        """From 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps) if self.steps else 1.0
        assert self.seconds is not None
        return min(1.0, seconds / self.seconds)

    def rate(self, progress: float) -> float:
        """The learning rate: up in a line, down along a cosine."""
        rise = min(1.0, progress / WARM_UP)
        fall = 0.5 + 0.5 * math.cos(math.pi * max(0.0, progress - WARM_UP) / (1.0 - WARM_UP))
        return self.learning_rate * min(rise or 1e-3, FLOOR + (1.0 - FLOOR) * fall)

    def weight(self, step: int) -> float:
        """Of a draft's loss; they sum to one."""
        return self.decay**step / sum(self.decay**other for other in range(self.unroll))


class Trainer:
    """head: on the target's device. folder: for checkpoint.pt and training.jsonl. What is there is gone on from."""

    def __init__(self, target: Target, head: Eagle3Head, folder: Path, recipe: Recipe) -> None:
        self._target, self.head, self._folder, self._recipe = target, head, folder, recipe
        assert head.target_ids is not None
        assert head.config.window is not None
        self._device = target.lm_head.device
        self._rows = target.lm_head[head.target_ids]
        self._masks = ChainMasks(head.config.window, self._device)
        self._parameters = list(head.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        self.step, self.seconds = 0, 0.0

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint.pt"

    def load(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        if not self._checkpoint.exists():
            return False
        # To the host: what is a parameter's goes to its device anyhow, and AdamW's counters had better stay here.
        stored = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        self.head.load_state_dict(stored["head"])
        self._optimizer.load_state_dict(stored["optimizer"])
        self.step, self.seconds = stored["step"], stored["seconds"]
        return True

    def save(self) -> None:
        """Write the checkpoint: the old one stays whole until the new one is."""
        content = {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        unfinished = self._checkpoint.with_suffix(".unfinished")
        torch.save(content, unfinished)
        os.replace(unfinished, self._checkpoint)

    def run(self, texts: Sequence[Text], held_out: Sequence[Text] = (), progress: bool = True) -> None:
        """Train until the recipe's time is over; save and measure now and then, and at the end."""
        recipe = self._recipe
        endless = batches(texts, recipe.batch_tokens, recipe.document_share, recipe.seed)
        begin, saved = time.monotonic() - self.seconds, time.monotonic()
        measured = recipe.progress(self.step, self.seconds)
        losses: list[torch.Tensor] = []
        with tqdm(total=1.0, bar_format=BAR, mininterval=1.0, disable=not progress) as bar:
            for chosen in itertools.islice(endless, self.step, None):
                part = recipe.progress(self.step, self.seconds)
                bar.update(part - bar.n)
                if part >= 1.0:
                    break
                if part - measured >= MEASURE_EVERY:
                    self.measure(held_out)
                    measured = part
                losses.append(self.train(collate(chosen, recipe.prompt_weight)))
                self.step += 1
                if self.step % LOG_EVERY == 0:
                    loss = float(torch.stack(losses).mean())
                    self._log({"loss": loss})
                    bar.set_postfix(step=self.step, loss=f"{loss:.3f}")
                    losses.clear()
                self.seconds = time.monotonic() - begin
                if time.monotonic() - saved > SAVE_EVERY_S:
                    self.save()
                    saved = time.monotonic()
        self.save()
        self.measure(held_out)

    def measure(self, held_out: Sequence[Text]) -> None:
        """Log how often drafts agree with the target, for each kind of text."""
        agreement = {}
        for kind in sorted({text.kind for text in held_out}):
            own = [text for text in held_out if text.kind == kind]
            agreement[kind] = self.agreement(own)
            tqdm.write(
                f"step {self.step}: in {len(own)} {kind}s held out, the first drafts are right {agreement[kind]}"
            )
        self._log({"agreement": agreement})

    def train(self, batch: Batch) -> torch.Tensor:
        """One step. Returns the loss, before it."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate(self._recipe.progress(self.step, self.seconds))
        loss = self.loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._optimizer.step()
        return loss.detach()

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean over rows of each draft's loss, over drafts as they weigh."""
        # All that is on the host goes over first: a copy in between would wait for the device.
        token_ids = self._to_device(batch.token_ids)
        chosen = []
        for step in range(self._recipe.unroll):
            rows, weights = batch.rows(step)
            weights = weights * (self._recipe.weight(step) / max(float(weights.sum()), 1e-6))
            chosen.append((self._to_device(rows), self._to_device(weights)))
        states = self._target.states(token_ids)
        # Logits are linear in the hidden states.
        probabilities = target_probabilities(states.hidden / self._recipe.temperature, self._rows)
        total = torch.zeros((), device=self._device)
        for step, drafted in enumerate(self._unroll(token_ids, states.aux, self._recipe.unroll)):
            rows, weights = chosen[step]
            total = total + soft_cross_entropy(
                drafted.hidden[rows] / self._recipe.temperature,
                drafted.lm_head,
                probabilities,
                rows + 1 + step,
                weights,
            )
        return total

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    @torch.no_grad()
    def agreement(self, texts: Sequence[Text], num_drafts: int = 3) -> list[float]:
        """The share of answers' rows where the first draft is the target's likeliest token, the first two are, ...

        Drafts of teacher-forced chains: on greedy text that is how often they are accepted.
        """
        right, count = torch.zeros(num_drafts, device=self._device), 0
        for text in texts:
            batch = collate([text], prompt_weight=0.0)
            rows = batch.rows(num_drafts - 1)[0].to(self._device)
            token_ids = batch.token_ids.to(self._device)
            states = self._target.states(token_ids)
            so_far = torch.ones(len(rows), dtype=torch.bool, device=self._device)
            for step, drafted in enumerate(self._unroll(token_ids, states.aux, num_drafts)):
                drafts = self.head.to_target((drafted.hidden[rows] @ drafted.lm_head.T).argmax(dim=-1))
                so_far &= drafts == self._target.model.logits(states.hidden[rows + 1 + step]).argmax(dim=-1)
                right[step] += so_far.sum()
            count += len(rows)
        return [round(share, 4) for share in (right / max(1, count)).tolist()]

    def _unroll(self, token_ids: torch.Tensor, aux: torch.Tensor, num_steps: int) -> Iterator[Unrolled]:
        return unroll(self.head, self._target.model, token_ids, aux, num_steps, self._masks, self._rows)

    def _log(self, values: dict[str, object]) -> None:
        line = {"step": self.step, "seconds": round(self.seconds, 1), **values}
        with (self._folder / "training.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
