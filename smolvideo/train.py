"""Train smolvideo in minutes on one GPU: `python -m smolvideo --base GGUF_OR_FOLDER --out FOLDER`.

The connector and the adapters are trained to answer; smolvision's shipped weights stay as they are. Then held-out
questions are put to the model as it ships: merged, rounded to bfloat16 and loaded by transformers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from smolvideo.architecture import save
from smolvideo.chats import Batch, Chats
from smolvideo.evaluate import Answers, evaluate
from smolvideo.model import Student
from smolvision.batches import loader
from smolvision.training import Trainer as ChatTrainer
from smolvision.training import chat_arguments, train_and_evaluate

SMOLVISION = Path(__file__).parents[1] / "smolvision" / "smolvision.safetensors"


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = chat_arguments("smolvideo", __doc__, minutes=7.8, evaluation_seconds=40.0, per_kind=60, batch=64, turns=6)
    return parser.parse_args(flags)


class Trainer(ChatTrainer):
    """Trains the connector and the adapters."""

    weights = "smolvideo.safetensors"

    def __init__(self, args: argparse.Namespace, base: Path) -> None:
        chats = Chats(base, args.seed, args.batch, args.turns)
        super().__init__(
            args,
            loader(chats, args.workers, args.device == "cuda", prefetch=2),
            lambda dtype: Student(base, args.start, dtype),
        )

    def loss(self, batch: Batch, phase: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, tokens = self.student.loss(batch)
        return loss, {"tokens": tokens}

    def save(self, path: Path, facts: dict[str, str]) -> None:
        save(path, dict(self.student.trained), facts)


def main(flags: Sequence[str] | None = None) -> None:
    """Train and evaluate with the arguments in `flags`, or those of the command line."""
    args = parse(flags)
    train_and_evaluate(
        args,
        Trainer,
        {"answer": 1.0},
        lambda folder: evaluate(Answers(folder, args.device), args.per_kind, batch=args.batch),
        below=SMOLVISION,
    )
