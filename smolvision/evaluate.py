"""Measure greedy answers to held-out questions with transformers: `python -m smolvision.evaluate FOLDER_OR_FILE`.

An answer is correct if it equals the expected one, ignoring case, spaces and the full stop.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from smolvision.conversations import TWO_IMAGE_KINDS, Chat, held_out_chats
from smolvision.images import render
from smolvision.measure import measure, model_arguments, model_folder
from smolvision.questions import KINDS

ALL_KINDS = (*KINDS, *TWO_IMAGE_KINDS)


class Answers:
    """A model that answers chats, loaded by transformers."""

    def __init__(self, folder: Path, device: str) -> None:
        """Load the model in bfloat16 on a GPU, else in float32."""
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._processor: Any = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
        self._model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=self._dtype).to(device).eval()
        self._device = device

    @torch.inference_mode()
    def __call__(self, chats: list[Chat], tokens: int = 56) -> list[str]:
        prompts = [
            self._processor.apply_chat_template(list(chat.messages), add_generation_prompt=True) for chat in chats
        ]
        images = [picture(scene_of, index) for index, chat in enumerate(chats) for scene_of in chat.scenes]
        inputs = self._processor(
            text=prompts, images=images, padding=True, padding_side="left", return_tensors="pt"
        ).to(self._device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self._dtype)
        made = self._model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        answers: list[str] = self._processor.batch_decode(
            made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers


def picture(scene: Any, seed: int) -> Image.Image:
    return Image.fromarray(render(scene, Random(seed)))


def evaluate(answers: Callable[[list[Chat]], list[str]], per_kind: int) -> dict[str, Any]:
    """Evaluate answers to held-out questions, as `measure` does."""
    return measure(answers, {kind: held_out_chats(kind) for kind in ALL_KINDS}, per_kind)


def main() -> None:
    args = model_arguments(__doc__).parse_args()
    with model_folder(args) as folder:
        json.dump(evaluate(Answers(folder, args.device), args.per_kind), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
