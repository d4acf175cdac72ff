"""The shared part of trainings: arguments, phases, the budget of time, and results.

smolvision, smolaudio and smolvideo train a `ChatStudent` with a `Trainer`; smoldraw and smoleagle have loops of their
own.
"""

import argparse
import json
import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from engine.checkpoints.gguf.convert import convert
from engine.checkpoints.gguf.file import GgufFile
from engine.checkpoints.merge import merge
from smolvision.student import ChatStudent

RESULTS = "results.json"


def arguments(package: str, description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all trainings have, and the defaults of one."""
    parser = argparse.ArgumentParser(
        f"python -m {package}", description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help=f"folder for weights and {RESULTS}")
    parser.add_argument("--minutes", type=float, help="total duration, evaluation included")
    parser.add_argument("--evaluation-seconds", type=float, help="seconds of --minutes reserved for evaluation")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.set_defaults(**defaults)
    return parser


def add_base(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of trainings that start with a language model."""
    parser.add_argument("--base", type=Path, required=True, help="the language model: GGUF file or folder")
    parser.add_argument("--start", type=Path, help="weights to continue from instead of random ones")


def chat_arguments(package: str, description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all trainings with a `Trainer` have, and the defaults of one."""
    parser = arguments(package, description)
    add_base(parser)
    parser.add_argument("--steps", type=int, default=0, help="maximum steps of a phase; 0 is as many as fit the time")
    parser.add_argument("--per-kind", type=int, default=200, help="held-out questions of each kind")
    parser.add_argument("--batch", type=int, help="chats per step")
    parser.add_argument("--turns", type=int, help="maximum questions per chat, as far as they fit")
    parser.add_argument("--workers", type=int, default=14, help="processes that generate chats")
    parser.add_argument("--compile", action="store_true", help="compile the language model's layers")
    parser.set_defaults(**defaults)
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Make the folder for results, and set torch up for training."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")


def base_folder(base: Path, made: Path) -> Path:
    """Return the language model's folder; a GGUF file is converted into `made`."""
    if base.is_dir():
        return base
    made.mkdir()
    convert(GgufFile(base), made, lambda *_: None)
    return made


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def write_results(folder: Path, results: dict[str, Any]) -> None:
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n")


@dataclass
class Phase:
    """A phase of training with a fixed duration: `begin` and `end` are in seconds of `time.monotonic`."""

    name: str
    begin: float
    end: float
    max_steps: int
    """Steps after which the phase ends earlier; 0 is without limit."""
    steps: int = 0

    @property
    def done(self) -> float:
        """The share of the phase that is done, from 0 to 1."""
        share = (time.monotonic() - self.begin) / (self.end - self.begin)
        return min(1.0, max(share, self.steps / self.max_steps if self.max_steps else 0.0))


class Trainer(ABC):
    """A student, its optimiser and the stream of batches."""

    weights: ClassVar[str]
    """Name of the file of weights."""

    def __init__(
        self, args: argparse.Namespace, batches: Iterator[Any], student: Callable[[torch.dtype], ChatStudent]
    ) -> None:
        self.args = args
        self.batches = batches
        self.device = torch.device(args.device)
        self.half = self.device.type == "cuda"
        """Whether to compute in bfloat16, which is slow on CPUs."""
        torch.manual_seed(args.seed)
        self.student: Any = student(torch.bfloat16 if self.half else torch.float32).to(self.device)
        if args.compile:
            torch._dynamo.config.suppress_errors = True  # code that cannot be compiled runs as it is
            for layer in self.student.language.layers:
                layer.compile()
        self.optimizer = torch.optim.AdamW(self.groups(), betas=(0.9, 0.98), weight_decay=0.01, fused=self.half)
        self.steps = 0

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimiser's groups of parameters, each with its highest learning rate."""
        learning = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        return [{"params": learning, "highest": self.args.rate}]

    def shares(self, phase: str, done: float) -> Sequence[float]:
        """Return the learning rate of each group at a point of a phase, as a share of its highest one."""
        return [cosine(done)]

    @abstractmethod
    def loss(self, batch: Any, phase: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of a batch, and figures to print, by name."""

    @abstractmethod
    def save(self, path: Path, facts: dict[str, str]) -> None:
        """Write the weights, with `facts` as metadata."""

    def train(self, shares: dict[str, float], started: float) -> dict[str, Any]:
        """Train in phases, of which `shares` are the shares of the time. Return facts about the run for the results."""
        args = self.args
        next(self.batches)  # wait until the workers have started
        begin = time.monotonic()
        end = started + args.minutes * 60 - args.evaluation_seconds
        starting = f"{begin - started:.0f} s"
        if end < begin + 1:
            raise SystemExit(f"starting took {starting}, which leaves no time to train: increase --minutes")
        print(f"ready after {starting} on {args.device}, {end - begin:.0f} s left to train", flush=True)
        first = begin
        for name, share in shares.items():
            phase = Phase(name, first, first + (end - begin) * share, args.steps)
            first = phase.end
            if share:
                self._run(phase)
        self._save(phase)
        return {
            "device": device_name(args.device),
            "steps": self.steps,
            "answered_chats": phase.steps * args.batch,
            "training_seconds": round(time.monotonic() - begin),
        }

    def _run(self, phase: Phase) -> None:
        """Run steps until the phase ends; print progress every 10 seconds, save weights every 60."""
        shown = saved = time.monotonic()
        waited = 0.0
        report: dict[str, torch.Tensor] = {}

        def show() -> None:
            rate = phase.steps * self.args.batch / (time.monotonic() - phase.begin + 1e-9)
            figures = " ".join(f"{name} {figure.item():.4f}" for name, figure in report.items())
            speed = f"{rate:.0f} chats/s, waited {waited:.0f} s for them"
            print(f"{phase.name} {phase.done:4.0%} step {self.steps} {figures}, {speed}", flush=True)

        while (done := phase.done) < 1:
            warm = min(1.0, (phase.steps + 1) / 100)
            for group, share in zip(self.optimizer.param_groups, self.shares(phase.name, done), strict=True):
                group["lr"] = group["highest"] * warm * share
            before = time.monotonic()
            batch = next(self.batches).to(self.device)
            waited += time.monotonic() - before
            report = self._step(batch, phase.name)
            phase.steps += 1
            self.steps += 1
            now = time.monotonic()
            if now - shown > 10 and phase.done < 1:
                show()
                shown = now
            if now - saved > 60:
                self._save(phase)
                saved = now
        show()

    def _step(self, batch: Any, phase: str) -> dict[str, torch.Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss, report = self.loss(batch, phase)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach(), **report}

    def _save(self, phase: Phase) -> None:
        facts = {"steps": str(self.steps), "chats": str(phase.steps * self.args.batch)}
        self.save(self.args.out / self.weights, facts)


def cosine(done: float) -> float:
    """Return the share of the highest learning rate, which falls from 1 to 0."""
    return (1 + math.cos(math.pi * done)) / 2


def train_and_evaluate(
    args: argparse.Namespace,
    trainer: Callable[[argparse.Namespace, Path], Trainer],
    shares: dict[str, float],
    evaluate: Callable[[Path], dict[str, Any]],
    *,
    below: Path | None = None,
    encoder: Path | None = None,
) -> None:
    """Train, merge the weights into a model folder, and write the results of evaluating that.

    `trainer` gets the folder of SmolLM2, merged with the weights `below` if there are any. `shares` are the phases'
    shares of the time. `encoder` is the folder of an encoder that is merged too.
    """
    started = time.monotonic()
    prepare(args)
    with tempfile.TemporaryDirectory() as scratch:
        base = base_folder(args.base, Path(scratch) / "language")
        if below is not None:
            base = _merged(base, below, Path(scratch) / "below")
        made = trainer(args, base)
        facts, weights = made.train(shares, started), args.out / made.weights
        del made  # whose memory the evaluation needs
        found = evaluate(_merged(base, weights, Path(scratch) / "shipped", encoder))
    found = {**facts, "minutes": round((time.monotonic() - started) / 60, 2), **found}
    write_results(args.out, found)
    print(
        f"{found['accuracy']:.2%} of {found['asked']} held-out answers correct, {found['minutes']} minutes in total",
        flush=True,
    )


def _merged(base: Path, weights: Path, into: Path, encoder: Path | None = None) -> Path:
    into.mkdir()
    merge(base, weights, into, lambda *_: None, encoder)
    return into
