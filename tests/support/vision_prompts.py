"""Prompts with images for the tiny models of `tests.support.vision_models`.

It also has what transformers generates for them, which the engine has to match.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from msgspec.structs import replace
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from engine.embedded.core import EngineCore
from engine.media import MediaSpan, MediaSpans
from engine.types import Delta, GenerateRequest, SamplingParams
from tests.support.handoff import sequence_of
from tests.support.vision_models import TOKENS, image

OUTPUT = 12
SIZES = ((40, 30), (30, 61), (16, 16), (64, 20))
"""Of the images, in turn, in pixels."""
ROWS = 16
"""MediaSpan tokens of LLaVA, and of each of the squares that Idefics cuts images into."""


@dataclass(frozen=True)
class Shown:
    """An image as its tower makes it: the pixels by name, and the embeddings, [rows, hidden size]."""

    key: str
    pixels: dict[str, torch.Tensor]
    embeddings: torch.Tensor
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    images: tuple[MediaSpan, ...]
    shown: tuple[Shown, ...]


class Family:
    """One model as transformers runs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.kind: str = self.module.config.model_type
        self.token: int = self.module.config.image_token_id
        self._shown: dict[int, Shown] = {}

    def shown(self, seed: int) -> Shown:
        """The image of this number, encoded alone."""
        if seed not in self._shown:
            more = {"return_row_col_info": True} if self.kind in ("idefics3", "smolvlm") else {}
            picture = image(*SIZES[seed % len(SIZES)], seed=seed)
            inputs = self._processor([picture], return_tensors="pt", **more)
            pixels = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            with torch.inference_mode():
                features = self.module.get_image_features(**pixels, return_dict=True).pooler_output
            grid = pixels["image_grid_thw"][0].tolist() if "image_grid_thw" in pixels else (0, 0, 0)
            self._shown[seed] = Shown(
                blake3(str(seed).encode()).hexdigest(), pixels, torch.cat(list(features)), tuple(grid)
            )
        return self._shown[seed]

    def prompt(self, *parts: int | list[int]) -> Prompt:
        """Lists are token ids, numbers are images."""
        tokens: list[int] = []
        images: list[MediaSpan] = []
        shown: list[Shown] = []
        for part in parts:
            if isinstance(part, list):
                tokens += part
                continue
            shown.append(self.shown(part))
            rows, start = len(shown[-1].embeddings), len(tokens)
            tokens += self._expansion(rows)
            data = shown[-1].embeddings.numpy().tobytes()
            images.append(
                MediaSpan(
                    key=shown[-1].key,
                    start=start,
                    length=len(tokens) - start,
                    rows=rows,
                    dtype="float32",
                    data=data,
                    grid=shown[-1].grid,
                )
            )
        return Prompt(tuple(tokens), tuple(images), tuple(shown))

    def generate(self, prompt: Prompt, count: int = OUTPUT) -> list[int]:
        """Greedy, by transformers' own loop, from the pixels."""
        inputs = self._inputs(prompt, prompt.tokens)
        output = self.module.generate(
            **inputs, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        tokens: list[int] = output[0, len(prompt.tokens) :].tolist()
        return tokens

    @torch.inference_mode()
    def logprobs(self, prompt: Prompt, output: list[int]) -> torch.Tensor:
        """Of what follows each token of prompt and output: [tokens, vocabulary]."""
        logits: torch.Tensor = self.module(**self._inputs(prompt, (*prompt.tokens, *output)), use_cache=False).logits
        return logits[0].log_softmax(-1)

    def _expansion(self, rows: int) -> list[int]:
        if self.kind.startswith("qwen"):
            return [TOKENS["<|vision_start|>"], *[self.token] * rows, TOKENS["<|vision_end|>"]]
        if self.kind == "llava":
            return [self.token] * rows
        return [
            token for _ in range(rows // ROWS) for token in (TOKENS["<fake_token_around_image>"], *[self.token] * ROWS)
        ]

    def _inputs(self, prompt: Prompt, tokens: tuple[int, ...]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([tokens])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        dimension = 1 if self.kind in ("idefics3", "smolvlm") else 0
        for name in prompt.shown[0].pixels if prompt.shown else ():
            inputs[name] = torch.cat([shown.pixels[name] for shown in prompt.shown], dimension)
        if self.kind.startswith("qwen") and prompt.shown:
            inputs["mm_token_type_ids"] = (ids == self.token).int()
        return inputs


def text(length: int, seed: int) -> list[int]:
    """Tokens that stand for nothing but themselves."""
    return np.random.default_rng(seed).integers(60, 384, length).tolist()


def request_for(name: str, prompt: Prompt, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True, **sampling})
    return GenerateRequest(
        request_id=name, prompt_token_ids=prompt.tokens, sampling=params, media=MediaSpans(prompt.images)
    )


def without_data(request: GenerateRequest) -> GenerateRequest:
    """As a decode replica gets it."""
    return replace(request, media=MediaSpans(tuple(replace(image, data=b"") for image in request.spans)))


def answers(core: EngineCore, requests: list[GenerateRequest]) -> dict[str, list[Delta]]:
    """What a core makes of requests, all at once."""
    deltas: dict[str, list[Delta]] = {}
    for request in requests:
        core.add(sequence_of(core, request))
    while core.busy:
        for name, delta in core.step():
            assert isinstance(delta, Delta), delta.__cause__ or delta
            deltas.setdefault(name, []).append(delta)
        core.scheduler.audit()
    return deltas
