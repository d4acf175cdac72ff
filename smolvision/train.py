"""Train smolvision in minutes on one GPU: `python -m smolvision --base GGUF_OR_FOLDER --out FOLDER`.

1. Only the tower is trained, to classify what each patch shows.
2. Tower, projector and low-rank adapters are trained to answer, with the patches as a second, smaller loss.
3. Held-out questions are put to the model as it ships: merged, rounded to bfloat16 and loaded by transformers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smolvision.architecture import save
from smolvision.batches import Batch, Chats, loader
from smolvision.evaluate import Answers, evaluate
from smolvision.images import LABELS
from smolvision.model import Student
from smolvision.training import Trainer as ChatTrainer
from smolvision.training import chat_arguments, cosine, train_and_evaluate


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = chat_arguments(
        "smolvision", __doc__, minutes=8.7, evaluation_seconds=30.0, per_kind=200, batch=256, turns=6
    )
    parser.add_argument(
        "--look-share",
        type=float,
        default=0.35,
        help="share of the training time for the tower alone; use 0 with --start",
    )
    parser.add_argument("--length", type=int, default=224, help="tokens per chat")
    parser.add_argument("--tower-rate", type=float, default=1e-3, help="highest learning rate of the tower")
    return parser.parse_args(flags)


class Trainer(ChatTrainer):
    """Trains the tower ("look"), then all parts ("answer")."""

    weights = "smolvision.safetensors"

    def __init__(self, args: argparse.Namespace, base: Path) -> None:
        chats = Chats(base / "tokenizer.json", args.seed, args.batch, args.turns, args.length)
        super().__init__(
            args,
            loader(chats, args.workers, args.device == "cuda"),
            lambda dtype: Student(base, args.start, dtype),
        )

    def groups(self) -> list[dict[str, Any]]:
        seeing = [*self.student.tower.parameters(), *self.student.heads.parameters()]
        known = {id(parameter) for parameter in seeing}
        speaking = [parameter for parameter in self.student.trained.values() if id(parameter) not in known]
        return [{"params": seeing, "highest": self.args.tower_rate}, {"params": speaking, "highest": self.args.rate}]

    def shares(self, phase: str, done: float) -> Sequence[float]:
        """Both follow a cosine; the tower's is spread over both phases."""
        return (0.4 + 0.6 * cosine(done), 0.0) if phase == "look" else (0.4 * cosine(done), cosine(done))

    def loss(self, batch: Batch, phase: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        features = self.student.look(batch.images)
        patches, right = self.student.patch_loss(features, batch.patches)
        report = dict(zip(LABELS, right, strict=True))
        if phase == "look":
            return patches, report
        answers, tokens = self.student.answer_loss(batch, features)
        return answers + 0.3 * patches, {"answers": answers.detach(), "tokens": tokens, **report}

    def save(self, path: Path, facts: dict[str, str]) -> None:
        save(path, dict(self.student.trained), facts)


def main(flags: Sequence[str] | None = None) -> None:
    """Train and evaluate with the arguments in `flags`, or those of the command line."""
    args = parse(flags)
    train_and_evaluate(
        args,
        Trainer,
        {"look": args.look_share, "answer": 1 - args.look_share},
        lambda folder: evaluate(Answers(folder, args.device), args.per_kind),
    )
