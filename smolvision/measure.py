"""Count correct answers to held-out questions.

An answer is correct if it equals the expected one, ignoring case, spaces and the full stop.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from engine.checkpoints.merge import merge
from engine.checkpoints.packaged import BUILTIN
from engine.checkpoints.store import resolve_model


class Asked(Protocol):
    """A chat whose last message is a question with content parts."""

    @property
    def messages(self) -> tuple[dict[str, Any], ...]: ...


C = TypeVar("C", bound=Asked)


def measure(
    answers: Callable[[list[C]], list[str]],
    held_out: Mapping[str, Iterator[tuple[C, str]]],
    per_kind: int,
    batch: int = 256,
) -> dict[str, Any]:
    """Return the number of questions and correct answers, overall and by kind, and the wrong answers.

    `held_out` has endless chats and their expected answers, by kind of question.
    """
    asked = [(kind, *chat) for kind, chats in held_out.items() for chat in itertools.islice(chats, per_kind)]
    chats = [chat for _, chat, _ in asked]
    said = [answer for first in range(0, len(chats), batch) for answer in answers(chats[first : first + batch])]
    found: dict[str, Any] = {kind: {"asked": per_kind, "right": per_kind, "wrong": []} for kind in held_out}
    for (kind, chat, expected), answer in zip(asked, said, strict=True):
        if normal(answer) != normal(expected):
            question = next(part["text"] for part in chat.messages[-1]["content"] if part["type"] == "text")
            found[kind]["right"] -= 1
            found[kind]["wrong"].append((question, expected, answer))
    for kind, result in found.items():
        print(f"  {kind:12} {result['right']:4} of {per_kind:4}  {result['right'] / per_kind:6.1%}", file=sys.stderr)
    right = sum(result["right"] for result in found.values())
    return {"asked": len(asked), "right": right, "accuracy": right / len(asked), "kinds": found}


def normal(answer: str) -> str:
    return " ".join(answer.lower().split()).rstrip(".")


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of evaluations that load a model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="model folder, or file written by training")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/trellis").expanduser())
    return parser


@contextmanager
def model_folder(args: argparse.Namespace, encoder: Path | None = None) -> Iterator[Path]:
    """Yield the folder of the model; a file is merged with SmolLM2, and with the model in the folder `encoder`."""
    if not args.model.is_file():
        yield args.model
        return
    with tempfile.TemporaryDirectory() as made:
        merge(resolve_model(BUILTIN, args.cache_dir), args.model, Path(made), lambda *_: None, encoder)
        yield Path(made)
