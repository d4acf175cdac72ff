"""Measure greedy answers to held-out questions with transformers: `python -m smolaudio.evaluate FOLDER_OR_FILE`.

An answer is correct if it equals the expected one, ignoring case, spaces and the full stop.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AudioFlamingo3ForConditionalGeneration, AutoProcessor

from smolaudio.conversations import Chat, held_out_chats
from smolaudio.questions import KINDS
from smolaudio.speech import RATE
from smolvision.measure import measure, model_arguments, model_folder


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


def evaluate(answers: Callable[[list[Chat]], list[str]], per_kind: int) -> dict[str, Any]:
    """Evaluate answers to held-out questions, as `measure` does."""
    return measure(answers, {kind: held_out_chats(kind) for kind in KINDS}, per_kind)


def main() -> None:
    parser = model_arguments(__doc__)
    parser.add_argument("--whisper", type=Path, help="folder of Whisper-tiny.en, for a file")
    args = parser.parse_args()
    with model_folder(args, args.whisper) as folder:
        json.dump(evaluate(Answers(folder, args.device), args.per_kind), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
