"""Measure greedy answers to held-out questions with transformers: `python -m smolaudio.evaluate FOLDER_OR_FILE`.

An answer is correct if it equals the expected one, ignoring case, spaces and the full stop.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AudioFlamingo3ForConditionalGeneration, AutoProcessor

from engine.checkpoints.merge import merge
from engine.checkpoints.packaged import BUILTIN
from engine.checkpoints.store import resolve_model
from smolaudio.conversations import Chat, held_out_chats
from smolaudio.questions import KINDS
from smolaudio.speech import RATE


class Answers:
    """A model that answers chats, loaded by transformers."""

    def __init__(self, folder: Path, device: str) -> None:
        """Load the model in bfloat16 on a GPU, else in float32."""
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._processor: Any = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
        model: Any = AudioFlamingo3ForConditionalGeneration.from_pretrained(folder, dtype=self._dtype)
        model.lm_head.weight = model.get_input_embeddings().weight  # which transformers does not tie in this class
        self._model = model.to(device).eval()
        self._device = device

    @torch.inference_mode()
    def __call__(self, chats: list[Chat], tokens: int = 32) -> list[str]:
        template = self._processor.apply_chat_template
        prompts = [template(list(chat.messages), add_generation_prompt=True, tokenize=False) for chat in chats]
        sounds = [chat.samples.astype(np.float32) / 32768 for chat in chats if chat.samples is not None]
        inputs = self._processor(text=prompts, audio=sounds, sampling_rate=RATE).to(self._device)
        inputs["input_features"] = inputs["input_features"].to(self._dtype)
        made = self._model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        answers: list[str] = self._processor.batch_decode(
            made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers


def normal(answer: str) -> str:
    return " ".join(answer.lower().split()).rstrip(".")


def evaluate(answers: Callable[[list[Chat]], list[str]], per_kind: int, batch: int = 256) -> dict[str, Any]:
    """Return the number of questions and correct answers, and the wrong answers, overall and by kind."""
    asked = [(kind, *question) for kind in KINDS for question in itertools.islice(held_out_chats(kind), per_kind)]
    chats = [chat for _, chat, _ in asked]
    said = [answer for first in range(0, len(chats), batch) for answer in answers(chats[first : first + batch])]
    found: dict[str, Any] = {kind: {"asked": per_kind, "right": per_kind, "wrong": []} for kind in KINDS}
    for (kind, _, expected), answer in zip(asked, said, strict=True):
        if normal(answer) != normal(expected):
            found[kind]["right"] -= 1
            found[kind]["wrong"].append((expected, answer))
    for kind, result in found.items():
        print(f"  {kind:12} {result['right']:4} of {per_kind:4}  {result['right'] / per_kind:6.1%}", flush=True)
    right = sum(result["right"] for result in found.values())
    return {"asked": len(asked), "right": right, "accuracy": right / len(asked), "kinds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="model folder, or file written by training")
    parser.add_argument("--whisper", type=Path, help="folder of Whisper-tiny.en, for a file")
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/trellis").expanduser())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.model
        if folder.is_file():
            folder = Path(made)
            merge(resolve_model(BUILTIN, args.cache_dir), args.model, folder, lambda *_: None, args.whisper)
        json.dump(evaluate(Answers(folder, args.device), args.per_kind), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
