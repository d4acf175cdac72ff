"""Measure greedy answers to held-out questions: `python -m smolvideo.evaluate http://127.0.0.1:8000`.

Each clip is encoded as a video file, sent to the server, and decoded there. Training asks transformers instead, with
frames that no codec has seen. An answer is correct if it equals the expected one, ignoring case, spaces and full stop.
"""

import argparse
import base64
import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import SmolVLMForConditionalGeneration

from smolvideo.chats import Chat, encode, held_out_chats, tokenizer
from smolvideo.clips import Clip, render
from smolvideo.questions import KINDS
from smolvision.measure import measure


class Answers:
    """A model that answers chats, loaded by transformers."""

    def __init__(self, folder: Path, device: str) -> None:
        """Load the model in bfloat16 on a GPU, else in float32."""
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._model: Any = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=self._dtype).to(device).eval()
        self._tokenizer = tokenizer(folder)
        self._device = device

    @torch.inference_mode()
    def __call__(self, chats: list[Chat], tokens: int = 48) -> list[str]:
        prompt = self._tokenizer.encode("<|im_start|>assistant\n").ids
        ids = [encode(self._tokenizer, chat)[0] + prompt for chat in chats]
        length = max(map(len, ids))
        padded = [[0] * (length - len(row)) + row for row in ids]
        seen = [[0] * (length - len(row)) + [1] * len(row) for row in ids]
        pictures = np.stack([chat.pictures(Random(index)) for index, chat in enumerate(chats)])
        pixels = torch.from_numpy(pictures).permute(0, 1, 4, 2, 3).to(self._device).float() / 127.5 - 1
        made = self._model.generate(
            input_ids=torch.tensor(padded, device=self._device),
            attention_mask=torch.tensor(seen, device=self._device),
            pixel_values=pixels.to(self._dtype),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=self._tokenizer.token_to_id("<|im_end|>"),
        )
        answers: list[str] = self._tokenizer.decode_batch(made[:, length:].tolist())
        return answers


class Served:
    """A server that answers chats, to which clips are sent as files."""

    def __init__(self, url: str, extension: str, concurrency: int) -> None:
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._extension = extension
        self._threads = ThreadPoolExecutor(concurrency)

    def __call__(self, chats: list[Chat]) -> list[str]:
        return [*self._threads.map(self._answer, chats, range(len(chats)))]

    def _answer(self, chat: Chat, seed: int) -> str:
        file = base64.b64encode(video_file(chat, Random(seed), self._extension)).decode()
        video = {"type": "video_url", "video_url": {"url": f"data:video/{self._extension};base64,{file}"}}
        messages = [
            {**message, "content": [video if part["type"] == "video" else part for part in message["content"]]}
            for message in chat.messages
        ]
        body = json.dumps({"model": "smolvideo", "messages": messages, "temperature": 0, "max_tokens": 48})
        request = urllib.request.Request(self._url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer: str = json.load(response)["choices"][0]["message"]["content"]
        return answer


def video_file(chat: Chat, rng: Random, extension: str = "mp4") -> bytes:
    """Return a chat's clip as a file: MPEG-4 in MP4, or VP9 in WebM."""
    import cv2  # noqa: PLC0415 - training has no codec

    assert isinstance(chat.subject, Clip)
    codec = cv2.VideoWriter.fourcc(*{"mp4": "mp4v", "webm": "VP90"}[extension])
    frames = render(chat.subject, np.linspace(0, 1, chat.total).tolist(), rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip.{extension}"
        writer = cv2.VideoWriter(str(path), codec, chat.fps, frames.shape[2:0:-1])
        for frame in frames:
            writer.write(frame[:, :, ::-1])
        writer.release()
        return path.read_bytes()


def evaluate(answers: Callable[[list[Chat]], list[str]], per_kind: int, batch: int = 64) -> dict[str, Any]:
    """Evaluate answers to held-out questions, as `measure` does."""
    return measure(answers, {kind: held_out_chats(kind) for kind in KINDS}, per_kind, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of a server with MODEL=smolvideo")
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--extension", choices=("mp4", "webm"), default="mp4")
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    json.dump(evaluate(Served(args.url, args.extension, args.concurrency), args.per_kind), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
