"""Measure pictures per second, next to plain `diffusers`: `python -m benchmarks.drawing FOLDER`.

FOLDER is a folder of diffusers, or smoldraw's file. Both load it in the same precision and draw the same prompts with
the same seeds, steps and guidance, in turns. Plain diffusers draws them one after the other, as a script that answers
requests does, and in batches; the engine gets all as requests of their own, and its time includes writing PNG files.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from engine.checkpoints.merge import unpack
from engine.visual.engine import QueuedVisualEngine
from engine.visual.types import VisualConfig, VisualRequest
from engine.visual.with_diffusers import DiffusersPipeline

PROMPT = "a red circle above a blue square on a white background"


class Way(NamedTuple):
    """A way of drawing: the batch, and the engine's configuration; None for plain diffusers."""

    name: str
    batch: int
    engine: dict[str, Any] | None = None


class Plain:
    """diffusers' pipeline, as its documentation shows it."""

    def __init__(self, folder: str, device: str, batch: int, options: argparse.Namespace) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._pipeline: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype).to(device)
        self._pipeline.set_progress_bar_config(disable=True)
        self._batch = batch
        self._options = options

    async def start(self) -> None:
        pass

    async def draw(self, number: int) -> list[np.ndarray]:
        made: list[np.ndarray] = []
        for first in range(0, number, self._batch):
            seeds = range(first, min(first + self._batch, number))
            found = self._pipeline(
                [PROMPT] * len(seeds),
                num_inference_steps=self._options.steps,
                guidance_scale=self._options.guidance,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                use_resolution_binning=False,
                clean_caption=False,
            )
            made += [np.asarray(image) for image in found.images]
        return made

    async def close(self) -> None:
        del self._pipeline


class Ours:
    """The engine of visual generation."""

    def __init__(self, folder: str, device: str, way: Way, options: argparse.Namespace) -> None:
        config = VisualConfig(
            backend="diffusers", model=folder, device=device, max_batch=way.batch, max_queue=4096, **way.engine or {}
        )
        self._engine = QueuedVisualEngine(config, DiffusersPipeline(config))
        self._options = options

    async def start(self) -> None:
        await self._engine.start()

    async def draw(self, number: int) -> list[np.ndarray]:
        return list(await asyncio.gather(*(self._one(seed) for seed in range(number))))

    async def _one(self, seed: int) -> np.ndarray:
        info = self._engine.info
        request = VisualRequest(
            request_id=str(seed),
            prompt=PROMPT,
            seeds=(seed,),
            width=info.width,
            height=info.height,
            steps=self._options.steps,
            guidance=self._options.guidance,
        )
        data = [news.data async for news in self._engine.generate(request) if news.data]
        with tempfile.SpooledTemporaryFile() as file:
            file.write(data[0])
            return np.asarray(Image.open(file).convert("RGB"))

    async def close(self) -> None:
        await self._engine.close()


async def measure(options: argparse.Namespace, folder: str, device: str) -> None:
    """Print a table of all ways."""
    many = options.batch
    ways = [
        Way("plain diffusers, one by one", 1),
        Way(f"plain diffusers, batches of {many}", many),
        Way("engine, one by one", 1, {}),
        Way(f"engine, batches of {many}", many, {}),
        Way(f"engine, batches of {many}, step cache 0.1", many, {"step_cache": 0.1}),
    ]
    running = [
        (Ours(folder, device, way, options) if way.engine is not None else Plain(folder, device, way.batch, options))
        for way in ways
    ]
    pictures: list[list[np.ndarray]] = []
    for one in running:
        await one.start()
        await one.draw(many)  # what is compiled at first use
        pictures.append(await one.draw(many))
    rates: list[list[float]] = [[] for _ in ways]
    for _ in range(options.rounds):
        for one, found in zip(running, rates, strict=True):
            begun = time.monotonic()
            number = len(await one.draw(options.pictures))
            found.append(number / (time.monotonic() - begun))
    print(f"{device}: {options.pictures} pictures of {options.steps} steps, guidance {options.guidance}; ", end="")
    print(f"diffusers' first way is 1; median of {options.rounds} rounds\n")
    print("| | pictures/s (all rounds) | ratio | largest difference of a pixel, mean |\n|---|---|---|---|")
    for way, found, made in zip(ways, rates, pictures, strict=True):
        apart = np.abs(np.stack(made).astype(int) - np.stack(pictures[0]).astype(int))
        shown = f"{median(found):.2f} ({', '.join(f'{rate:.2f}' for rate in found)})"
        ratio = median(found) / median(rates[0])
        print(f"| {way.name} | {shown} | {ratio:.2f} | {apart.max()}, {apart.mean():.3f} |", flush=True)
    for one in running:
        await one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of diffusers, or smoldraw.safetensors")
    parser.add_argument("--pictures", type=int, default=64, help="pictures of a round")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.model
        if folder.is_file():
            folder = Path(made)
            unpack(options.model, folder, lambda *_: None)
        asyncio.run(measure(options, str(folder), options.device))


if __name__ == "__main__":
    main()
