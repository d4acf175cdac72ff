"""smoldraw as it is served: held-out prompts go in, pictures and clips that its judge finds right come out."""

import base64
import io
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers", reason="needs the extra visual")
pytest.importorskip("av", reason="needs the extra visual")

import av

from smoldraw.evaluate import HERE, JUDGE, held_out, load_judge
from smoldraw.judge import is_right, is_right_clip
from smoldraw.render import FRAMES
from tests.support.disaggregated import servers
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def smoldraw() -> Iterator[ServerProcess]:
    with servers(("--engine", "embedded", "--model", "smoldraw")) as (running,):
        yield running


def test_it_draws_held_out_prompts(smoldraw: ServerProcess) -> None:
    drawings = [drawing for drawing in held_out("image", 16) if drawing.kind in ("one", "place", "relation")]
    pictures = []
    for number, drawing in enumerate(drawings):
        body = {"prompt": drawing.prompt, "size": "64x64", "seed": number, "guidance_scale": 3.0}
        answer = httpx.post(f"{smoldraw.url}/v1/images/generations", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        picture = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))).convert("RGB")
        assert picture.size == (64, 64)
        pictures.append(torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 127.5 - 1)
    seen = load_judge(HERE / JUDGE, "cpu").see(torch.stack(pictures))
    wrong = [drawing.prompt for drawing, found in zip(drawings, seen, strict=True) if not is_right(drawing, found)]
    assert len(drawings) >= 5 and len(wrong) <= 1, wrong


@pytest.fixture(scope="module")
def clips() -> Iterator[ServerProcess]:
    with servers(("--engine", "embedded", "--model", "smoldraw-clips")) as (running,):
        yield running


def test_it_makes_held_out_clips(clips: ServerProcess) -> None:
    drawings = held_out("clip", 3)
    judge = load_judge(HERE / JUDGE, "cpu")
    wrong = []
    for number, drawing in enumerate(drawings):
        body = {"prompt": drawing.prompt, "size": "64x64", "seed": number, "guidance_scale": 1.5}
        answer = httpx.post(f"{clips.url}/v1/videos/generations", json=body | {"num_inference_steps": 10}, timeout=120)
        assert answer.status_code == 200, answer.text
        with av.open(io.BytesIO(answer.content)) as file:
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        assert len(frames) == FRAMES
        pictures = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2) / 127.5 - 1
        if not is_right_clip(drawing, judge.see(pictures)):
            wrong.append(drawing.prompt)
    assert len(wrong) <= 1, wrong
