"""Train smolaudio in minutes on one GPU: `python -m smolaudio --base GGUF_OR_FOLDER --whisper FOLDER --out FOLDER`.

1. Only the projector is trained, to spell what is said.
2. Projector and low-rank adapters are trained to answer, with the spelling as a second, smaller loss.
3. Held-out questions are put to the model as it ships: merged, rounded to bfloat16 and loaded by transformers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from smolaudio.architecture import save
from smolaudio.batches import Batch, Chats, spoken_tokens
from smolaudio.evaluate import Answers, evaluate
from smolaudio.model import Student
from smolvision.batches import loader
from smolvision.training import Trainer as ChatTrainer
from smolvision.training import chat_arguments, cosine, train_and_evaluate


def parse(flags: Sequence[str] | None) -> argparse.Namespace:
    parser = chat_arguments(
        "smolaudio", __doc__, minutes=7.8, evaluation_seconds=75.0, per_kind=200, batch=192, turns=4, workers=8
    )
    parser.add_argument("--whisper", type=Path, required=True, help="folder of Whisper-tiny.en")
    parser.add_argument(
        "--spell-share", type=float, default=0.12, help="share of the time for the projector alone; use 0 with --start"
    )
    parser.add_argument("--length", type=int, default=288, help="tokens per chat")
    return parser.parse_args(flags)


class Trainer(ChatTrainer):
    """Trains the projector ("spell"), then projector and adapters ("answer")."""

    weights = "smolaudio.safetensors"

    def __init__(self, args: argparse.Namespace, base: Path) -> None:
        tokenizer = base / "tokenizer.json"
        chats = Chats(tokenizer, args.seed, args.batch, args.turns, args.length)
        super().__init__(
            args,
            loader(chats, args.workers, args.device == "cuda"),
            lambda dtype: Student(base, args.whisper, spoken_tokens(tokenizer), args.start, dtype),
        )

    def shares(self, phase: str, done: float) -> Sequence[float]:
        return [1.0 if phase == "spell" else cosine(done)]

    def loss(self, batch: Batch, phase: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        vectors, counts = self.student.hear(batch)
        spelling = self.student.spelling_loss(batch, vectors, counts)
        report = {"spelling": spelling.detach()}
        if phase == "spell":
            return spelling, report
        answers, tokens = self.student.answer_loss(batch, vectors, counts)
        return answers + 0.1 * spelling, {"answers": answers.detach(), "tokens": tokens, **report}

    def save(self, path: Path, facts: dict[str, str]) -> None:
        save(path, self.student.trained, self.student.encoder, facts)


def main(flags: Sequence[str] | None = None) -> None:
    """Train and evaluate with the arguments in `flags`, or those of the command line."""
    args = parse(flags)
    train_and_evaluate(
        args,
        Trainer,
        {"spell": args.spell_share, "answer": 1 - args.spell_share},
        lambda folder: evaluate(Answers(folder, args.device), args.per_kind),
        encoder=args.whisper,
    )
