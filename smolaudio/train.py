"""Train smolaudio in minutes on one GPU: `python -m smolaudio --base GGUF_OR_FOLDER --whisper FOLDER --out FOLDER`.

1. Only the projector is trained, to spell what is said.
2. Projector and low-rank adapters are trained to answer, with the spelling as a second, smaller loss.
3. Held-out questions are put to the model as it ships: merged, rounded to bfloat16 and loaded by transformers.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.merge import merge
from smolaudio.architecture import save
from smolaudio.batches import Batch, Chats, loader, spoken_tokens
from smolaudio.evaluate import Answers, evaluate
from smolaudio.model import Student
from smolvision.train import Phase, base_folder

WEIGHTS = "smolaudio.safetensors"
RESULTS = "results.json"


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m smolaudio", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="SmolLM2-135M-Instruct: GGUF file or model folder")
    parser.add_argument("--whisper", type=Path, required=True, help="folder of Whisper-tiny.en")
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {WEIGHTS} and {RESULTS}")
    parser.add_argument("--start", type=Path, help="weights to continue from; use with --spell-share 0")
    parser.add_argument("--minutes", type=float, default=7.8, help="total duration, evaluation included")
    parser.add_argument("--steps", type=int, default=1 << 30, help="maximum steps of each phase")
    parser.add_argument("--spell-share", type=float, default=0.12, help="share of the time for the projector alone")
    parser.add_argument(
        "--evaluation-seconds", type=float, default=75.0, help="seconds of --minutes reserved for evaluation"
    )
    parser.add_argument("--per-kind", type=int, default=200, help="held-out questions of each kind")
    parser.add_argument("--batch", type=int, default=192, help="chats per step")
    parser.add_argument("--length", type=int, default=288, help="tokens per chat")
    parser.add_argument("--turns", type=int, default=4, help="maximum questions per chat, as far as they fit")
    parser.add_argument("--workers", type=int, default=8, help="processes that generate chats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--compile", action="store_true", help="compile the language model's layers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(flags)


class Trainer:
    """The student, its optimiser and the stream of batches."""

    def __init__(self, args: argparse.Namespace, base: Path) -> None:
        self.args = args
        self.device = torch.device(args.device)
        tokenizer = base / "tokenizer.json"
        chats = Chats(tokenizer, args.seed, args.batch, args.turns, args.length)
        self.batches = loader(chats, args.workers, self.device.type == "cuda")
        torch.manual_seed(args.seed)
        self.half = self.device.type == "cuda"
        """Whether to compute in bfloat16, which is slow on CPUs."""
        dtype = torch.bfloat16 if self.half else torch.float32
        spoken = spoken_tokens(tokenizer)
        self.student = Student(base, args.whisper, spoken, args.start, dtype).to(self.device)
        if args.compile:
            for layer in self.student.language.layers:
                layer.compile()
        learning = [parameter for parameter in self.student.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            learning, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=self.device.type == "cuda"
        )
        self.steps = self.chats = 0
        self._shown = self._saved = time.monotonic()

    def run(self, phase: Phase) -> None:
        """Run steps until the phase ends; print progress every 10 seconds, save weights every 60."""
        answers = phase.name == "answer"
        first = self.steps
        while phase.done < 1 and self.steps - first < self.args.steps:
            warm = min(1.0, (self.steps - first + 1) / 100)
            share = (1 + math.cos(math.pi * phase.done)) / 2 if answers else 1.0
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.rate * warm * share
            report = self._step(next(self.batches).to(self.device), answers)
            self.steps += 1
            self.chats += self.args.batch
            now = time.monotonic()
            if now - self._shown > 10 or phase.done == 1 or self.args.steps < 100:
                values = " ".join(f"{name} {value.item():.4f}" for name, value in report.items())
                rate = self.chats / (now - phase.begin)
                print(f"{phase.name} {phase.done:4.0%} step {self.steps} {rate:.0f} chats/s {values}", flush=True)
                self._shown = now
            if now - self._saved > 60:
                self.save()
                self._saved = now

    def _step(self, batch: Batch, answers: bool) -> dict[str, torch.Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            vectors, counts = self.student.hear(batch)
            spelling = self.student.spelling_loss(batch, vectors, counts)
            report = {"spelling": spelling.detach()}
            loss = spelling
            if answers:
                answer, report["right"] = self.student.answer_loss(batch, vectors, counts)
                report["answers"] = answer.detach()
                loss = answer + 0.1 * spelling
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def save(self) -> None:
        facts = {"steps": str(self.steps), "chats": str(self.chats)}
        save(self.args.out / WEIGHTS, self.student.trained, self.student.encoder, facts)


def train(args: argparse.Namespace, base: Path, started: float) -> dict[str, Any]:
    """Train, and return facts about the run for the results."""
    trainer = Trainer(args, base)
    next(trainer.batches)  # wait until the workers have started
    begin = time.monotonic()
    end = started + args.minutes * 60 - args.evaluation_seconds
    if end < begin + 1:
        raise SystemExit(f"starting took {begin - started:.0f} s, which leaves no time to train: increase --minutes")
    print(f"ready after {begin - started:.0f} s on {args.device}, {end - begin:.0f} s left to train", flush=True)
    middle = begin + (end - begin) * args.spell_share
    phases = [Phase("spell", begin, middle), Phase("answer", middle, end)]
    for phase in phases[0 if args.spell_share else 1 :]:
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
        merge(base, args.out / WEIGHTS, shipped, lambda *_: None, args.whisper)
        found = evaluate(Answers(shipped, args.device), args.per_kind)
    found = {**facts, "minutes": round((time.monotonic() - started) / 60, 2), **found}
    (args.out / RESULTS).write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{found['accuracy']:.2%} of {found['asked']} held-out answers correct, {found['minutes']} minutes in total",
        flush=True,
    )
