"""Train smolvision in minutes on one GPU: `python -m smolvision --base GGUF_OR_FOLDER --out FOLDER`.

1. Only the tower is trained, to classify what each patch shows.
2. Tower, projector and low-rank adapters are trained to answer, with the patches as a second, smaller loss.
3. Held-out questions are put to the model as it ships: merged, rounded to bfloat16 and loaded by transformers.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.gguf.convert import convert
from engine.checkpoints.gguf.file import GgufFile
from engine.checkpoints.merge import merge
from smolvision.architecture import save
from smolvision.batches import Batch, Chats, loader
from smolvision.evaluate import Answers, evaluate
from smolvision.images import LABELS
from smolvision.model import Student

WEIGHTS = "smolvision.safetensors"
RESULTS = "results.json"


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m smolvision", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="SmolLM2-135M-Instruct: GGUF file or model folder")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {WEIGHTS} and {RESULTS}")
    parser.add_argument(
        "--start", type=Path, help="weights to continue from instead of random ones; use with --look-share 0"
    )
    parser.add_argument("--minutes", type=float, default=8.7, help="total duration, evaluation included")
    parser.add_argument("--look-share", type=float, default=0.35, help="share of the training time for the tower alone")
    parser.add_argument(
        "--evaluation-seconds", type=float, default=30.0, help="seconds of --minutes reserved for evaluation"
    )
    parser.add_argument("--per-kind", type=int, default=200, help="held-out questions of each kind")
    parser.add_argument("--batch", type=int, default=256, help="chats per step")
    parser.add_argument("--length", type=int, default=224, help="tokens per chat")
    parser.add_argument("--turns", type=int, default=6, help="maximum questions per chat, as far as they fit")
    parser.add_argument("--workers", type=int, default=14, help="processes that generate chats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tower-rate", type=float, default=1e-3, help="highest learning rate of the tower")
    parser.add_argument(
        "--rate", type=float, default=1e-3, help="highest learning rate of projector and low-rank adapters"
    )
    parser.add_argument("--compile", action="store_true", help="compile the language model's layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(flags)


@dataclass
class Phase:
    """A phase of training with a fixed duration: `begin` and `end` are in seconds of `time.monotonic`."""

    name: str
    begin: float
    end: float

    @property
    def done(self) -> float:
        return min(1.0, (time.monotonic() - self.begin) / (self.end - self.begin))


class Trainer:
    """The student, its optimiser and the stream of batches."""

    def __init__(self, args: argparse.Namespace, base: Path) -> None:
        self.args = args
        self.device = torch.device(args.device)
        chats = Chats(base / "tokenizer.json", args.seed, args.batch, args.turns, args.length)
        self.batches = loader(chats, args.workers, self.device.type == "cuda")
        torch.manual_seed(args.seed)
        self.half = self.device.type == "cuda"
        """Whether to compute in bfloat16, which is slow on CPUs."""
        self.student = Student(base, args.start, torch.bfloat16 if self.half else torch.float32).to(self.device)
        if args.compile:
            for layer in self.student.language.layers:
                layer.compile()
        seeing = [*self.student.tower.parameters(), *self.student.heads.parameters()]
        known = {id(parameter) for parameter in seeing}
        speaking = [parameter for parameter in self.student.trained.values() if id(parameter) not in known]
        groups = [{"params": seeing, "highest": args.tower_rate}, {"params": speaking, "highest": args.rate}]
        self.optimizer = torch.optim.AdamW(
            groups, betas=(0.9, 0.98), weight_decay=0.01, fused=self.device.type == "cuda"
        )
        self.steps = self.chats = 0
        self._shown = self._saved = time.monotonic()

    def run(self, phase: Phase) -> None:
        """Run steps until the phase ends; print progress every 10 seconds, save weights every 90."""
        answers = phase.name == "answer"
        first = self.steps
        while phase.done < 1:
            warm = min(1.0, (self.steps - first + 1) / 100)
            for group, share in zip(self.optimizer.param_groups, self._shares(phase), strict=True):
                group["lr"] = group["highest"] * warm * share
            said = self._step(next(self.batches).to(self.device), answers)
            self.steps += 1
            self.chats += self.args.batch
            now = time.monotonic()
            if now - self._shown > 10 or phase.done == 1:
                rate = self.chats / (now - phase.begin)
                print(f"{phase.name} {phase.done:4.0%} step {self.steps} {rate:.0f} chats/s {said}", flush=True)
                self._shown = now
            if now - self._saved > 90:
                self.save()
                self._saved = now

    def _shares(self, phase: Phase) -> tuple[float, float]:
        """Return the learning rates of tower and other parts, as shares of the highest rates.

        Both follow a cosine; the tower's is spread over both phases.
        """
        cosine = (1 + math.cos(math.pi * phase.done)) / 2
        return (0.4 + 0.6 * cosine, 0.0) if phase.name == "look" else (0.4 * cosine, cosine)

    def _step(self, batch: Batch, answers: bool) -> "Report":
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            features = self.student.look(batch.images)
            loss, right = self.student.patch_loss(features, batch.patches)
            report = Report(patches=right)
            if answers:
                report.answers, report.tokens = self.student.answer_loss(batch, features)
                loss = report.answers + 0.3 * loss
        report.loss = loss.detach()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def save(self) -> None:
        facts = {"steps": str(self.steps), "chats": str(self.chats)}
        save(self.args.out / WEIGHTS, dict(self.student.trained), facts)


@dataclass
class Report:
    """Results of one step, which stay on the device until they are printed."""

    patches: torch.Tensor
    loss: torch.Tensor | None = None
    answers: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    def __str__(self) -> str:
        parts = [f"{name} {right:.0%}" for name, right in zip(LABELS, self.patches.tolist(), strict=True)]
        shown = [f"loss {self.loss:.3f}", "patches: " + " ".join(parts)]
        if self.answers is not None and self.tokens is not None:
            shown.append(f"answers {self.answers.item():.4f} tokens {self.tokens.item():.2%}")
        return ", ".join(shown)


def base_folder(base: Path, made: Path) -> Path:
    """Return the language model's folder; a GGUF file is converted into `made`."""
    if base.is_dir():
        return base
    made.mkdir()
    convert(GgufFile(base), made, lambda *_: None)
    return made


def train(args: argparse.Namespace, base: Path, started: float) -> dict[str, Any]:
    """Train, and return facts about the run for the results."""
    trainer = Trainer(args, base)
    next(trainer.batches)  # wait until the workers have started
    begin = time.monotonic()
    end = started + args.minutes * 60 - args.evaluation_seconds
    if end < begin + 1:
        raise SystemExit(f"starting took {begin - started:.0f} s, which leaves no time to train: increase --minutes")
    print(f"ready after {begin - started:.0f} s on {args.device}, {end - begin:.0f} s left to train", flush=True)
    middle = begin + (end - begin) * args.look_share
    phases = [Phase("look", begin, middle), Phase("answer", middle, end)]
    for phase in phases[0 if args.look_share else 1 :]:
        trainer.chats = 0
        trainer.run(phase)
    trainer.save()
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return {
        "device": device,
        "steps": trainer.steps,
        "answered_chats": trainer.chats,
        "training_seconds": round(time.monotonic() - begin),
    }


def main(flags: Sequence[str] | None = None) -> None:
    """Train and evaluate with the arguments in `flags`, or those of the command line."""
    started = time.monotonic()
    args = parse(flags)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as scratch:
        base = base_folder(args.base, Path(scratch) / "base")
        facts = train(args, base, started)
        shipped = Path(scratch) / "shipped"
        shipped.mkdir()
        merge(base, args.out / WEIGHTS, shipped, lambda *_: None)
        found = evaluate(Answers(shipped, args.device), args.per_kind)
    found = {**facts, "minutes": round((time.monotonic() - started) / 60, 2), **found}
    (args.out / RESULTS).write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{found['accuracy']:.2%} of {found['asked']} held-out answers correct, {found['minutes']} minutes in total",
        flush=True,
    )
