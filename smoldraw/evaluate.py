"""Draw held-out prompts with diffusers' pipelines and have the judge look: `python -m smoldraw.evaluate`.

A picture is right if the judge finds exactly the shapes, colours, number, sizes, places, relation and background that
its prompt says; a clip, if it finds them in all pictures but one, and they move as the prompt says.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from engine.checkpoints.merge import unpack
from smoldraw.architecture import GUIDANCE
from smoldraw.judge import Judge, is_right, is_right_clip
from smoldraw.prompts import Drawing, make_clip, make_drawing
from smoldraw.render import FRAMES, PIXELS

HERE = Path(__file__).parent
WEIGHTS = {"image": "smoldraw.safetensors", "clip": "smoldraw-clips.safetensors"}
JUDGE = "judge.safetensors"
STEPS = 20


def held_out(kind: str, number: int) -> list[Drawing]:
    """Return a fixed sequence of different prompts of pictures ("image") or clips ("clip") that training has not."""
    make = make_drawing if kind == "image" else make_clip
    made: dict[str, Drawing] = {}
    for seed in range(10**6):
        if len(made) == number:
            break
        drawing = make(Random(seed), held_out=True)
        made.setdefault(drawing.prompt, drawing)
    return list(made.values())


def load_judge(path: Path, device: str) -> Judge:
    judge = Judge()
    judge.load_state_dict(load_file(path))
    return judge.float().eval().to(device)


def load_shipped(kind: str, weights: Path, device: str, dtype: torch.dtype | None = None) -> Any:
    """Return diffusers' pipeline of the file that training wrote into a folder; on a GPU in bfloat16 by default."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(weights / WEIGHTS[kind], Path(folder), lambda *_: None)
        dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def draw(pipeline: Any, prompts: Sequence[str], seed: int = 0, guidance: float = GUIDANCE) -> torch.Tensor:
    """Return pictures, float [prompts, 3, 64, 64], or clips, float [prompts, 16, 3, 64, 64], between 0 and 1."""
    same = {
        "num_inference_steps": STEPS,
        "guidance_scale": guidance,
        "generator": [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))],
        "output_type": "pt",
        "clean_caption": False,
    }
    if "Latte" in type(pipeline).__name__:
        made = pipeline(list(prompts), height=PIXELS, width=PIXELS, video_length=FRAMES, **same).frames
    else:
        made = pipeline(list(prompts), use_resolution_binning=False, **same).images
    return made.float()


def judged(pipeline: Any, judge: Judge, drawings: Sequence[Drawing], batch: int, guidance: float) -> Iterator[bool]:
    """Yield whether each prompt is drawn rightly."""
    device = next(judge.parameters()).device
    for first in range(0, len(drawings), batch):
        part = drawings[first : first + batch]
        made = draw(pipeline, [drawing.prompt for drawing in part], first, guidance).to(device) * 2 - 1
        if made.dim() == 4:
            yield from map(is_right, part, judge.see(made))
        else:
            yield from (is_right_clip(drawing, judge.see(clip)) for drawing, clip in zip(part, made, strict=True))


def evaluate(
    pipeline: Any, judge: Judge, drawings: Sequence[Drawing], batch: int, guidance: float = GUIDANCE
) -> dict[str, Any]:
    """Return how many prompts are drawn right, overall and by kind, and the wrong ones."""
    kinds: dict[str, dict[str, int]] = {}
    wrong = []
    for drawing, right in zip(drawings, judged(pipeline, judge, drawings, batch, guidance), strict=True):
        for name in (drawing.kind, "all"):
            count = kinds.setdefault(name, {"drawn": 0, "right": 0})
            count["drawn"] += 1
            count["right"] += right
        if not right:
            wrong.append(drawing.prompt)
    overall = kinds.pop("all")
    return {**overall, "accuracy": round(overall["right"] / overall["drawn"], 4), "kinds": kinds, "wrong": wrong}


def sheet(pictures: torch.Tensor, columns: int) -> Image.Image:
    """Return pictures, float [pictures, 3, height, width] between 0 and 1, as one with some columns."""
    number, _, height, width = pictures.shape
    rows = pictures.view(number // columns, columns, 3, height, width).permute(0, 3, 1, 4, 2)
    pixels = rows.reshape(-1, columns * width, 3).mul(255).round().clamp(0, 255).byte()
    return Image.fromarray(pixels.cpu().numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--weights", type=Path, default=HERE, help="folder of the files that training wrote")
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--clips", type=int, default=100)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--sheets", type=Path, help="folder for PNG files of the first pictures and clips")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    judge = load_judge(args.weights / JUDGE, args.device)
    found = {}
    for kind, number in (("image", args.pictures), ("clip", args.clips)):
        if not number:
            continue
        pipeline = load_shipped(kind, args.weights, args.device)
        drawings = held_out(kind, number)
        found[kind] = evaluate(pipeline, judge, drawings, args.batch if kind == "image" else args.batch // 8 + 1)
        if args.sheets:
            args.sheets.mkdir(parents=True, exist_ok=True)
            some = drawings[: 32 if kind == "image" else 4]
            drawn = draw(pipeline, [drawing.prompt for drawing in some]).flatten(0, -4)
            sheet(drawn[: len(drawn) // 8 * 8], 8).save(args.sheets / f"{kind}.png")
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
