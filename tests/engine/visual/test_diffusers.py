"""Pipelines of diffusers with random weights: what any folder can do, and what settings change."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("diffusers", reason="needs the extra visual")

from engine.checkpoints.conversions import ModelError
from engine.checkpoints.pipelines import resolve_pipeline
from engine.errors import EngineFailure, InvalidRequest
from engine.visual.base import Picture, Stopped
from engine.visual.types import VisualConfig, VisualRequest
from engine.visual.with_diffusers import DiffusersPipeline
from tests.support import visual_models

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return visual_models.pixart(tmp_path_factory.mktemp("models") / "pixart")


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return visual_models.stable_diffusion(tmp_path_factory.mktemp("models") / "unet")


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loaded(folder: Path, **settings: Any) -> DiffusersPipeline:
    pipeline = DiffusersPipeline(VisualConfig(backend="diffusers", model=str(folder), device="cpu", **settings))
    pipeline.load()
    return pipeline


def picture(prompt: str = "a red circle", seed: int = 1, **fields: Any) -> Picture:
    size = {"width": 32, "height": 32, "steps": 3, "guidance": 3.0}
    return Picture(VisualRequest(**{**size, **fields}, request_id="r", prompt=prompt, seeds=(seed,)), seed)


def no_tick(step: int, steps: int) -> None:
    pass


def drawn(pipeline: DiffusersPipeline, *pictures: Picture) -> list[Any]:
    return [frames.astype(int) for frames in pipeline.generate(pictures, no_tick)]


def file(size: tuple[int, int] = (40, 20), mode: str = "RGB", colour: Any = "red") -> bytes:
    found = io.BytesIO()
    Image.new(mode, size, colour).save(found, "PNG")
    return found.getvalue()


def test_a_picture_depends_on_its_prompt_and_seed_alone(pixart: Path, one_thread: None) -> None:
    pipeline = loaded(pixart)
    (alone,) = drawn(pipeline, picture())
    assert alone.shape == (1, 32, 32, 3)
    assert (drawn(pipeline, picture())[0] == alone).all()
    others = [picture("blue square", 2), picture("a red circle", 3), picture(), picture("square", negative_prompt="a")]
    together = drawn(pipeline, *others[:3])
    assert abs(together[2] - alone).max() <= 2, "up to rounding"
    assert abs(together[1] - alone).max() > 20, "another seed"
    assert abs(drawn(pipeline, picture("blue square", 1))[0] - alone).max() > 4, "another prompt"
    assert abs(drawn(pipeline, picture(guidance=9.0))[0] - alone).max() > 2
    assert abs(drawn(pipeline, picture(negative_prompt="blue square"))[0] - alone).max() > 2


def test_steps_are_reported_and_may_stop(pixart: Path) -> None:
    pipeline = loaded(pixart)
    steps: list[tuple[int, int]] = []
    pipeline.generate([picture()], lambda *step: steps.append(step))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    seen: list[Any] = []
    (finished,) = pipeline.generate([picture(steps=4, previews=3)], no_tick, seen.extend)
    assert [one.shape for one in seen] == [finished.shape] * 3
    far = [abs(one.astype(int) - finished).mean() for one in seen]
    assert far[0] > far[2] > 0, "less and less noise is left"

    def stop(step: int, steps: int) -> None:
        if step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        pipeline.generate([picture()], stop)
    assert drawn(pipeline, picture())[0].any(), "it goes on with the next"


def test_both_halves_of_guidance_may_be_computed_apart(pixart: Path, one_thread: None) -> None:
    together, apart = loaded(pixart), loaded(pixart, cfg_batching=False)
    pictures = [picture(), picture("blue square", 2)]
    for one, other in zip(drawn(together, *pictures), drawn(apart, *pictures), strict=True):
        assert abs(one - other).max() <= 2


def test_the_step_cache_skips_blocks(pixart: Path) -> None:
    """And forgets what it knew of a picture that was stopped."""
    plain, caching = loaded(pixart), loaded(pixart, step_cache=0.9)
    calls = {id(plain): 0, id(caching): 0}
    for pipeline in (plain, caching):
        block = pipeline.denoiser.transformer_blocks[1]
        attention, own = block.attn1, id(pipeline)
        attention.register_forward_hook(lambda *_, own=own: calls.__setitem__(own, calls[own] + 1))
    asked = picture(steps=6)
    drawn(plain, asked)
    (first,) = drawn(caching, asked)
    assert calls[id(plain)] == 6
    assert 1 <= calls[id(caching)] < 6

    def stop(step: int, steps: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        caching.generate([picture("blue square", 9), picture("square", 10)], stop)
    assert (drawn(caching, asked)[0] == first).all()


def test_a_pipeline_that_has_no_blocks_has_no_step_cache(unet: Path) -> None:
    with pytest.raises(EngineFailure, match="VISUAL_STEP_CACHE"):
        loaded(unet, step_cache=0.1)


def test_pictures_are_changed(unet: Path, pixart: Path) -> None:
    pipeline = loaded(unet)
    assert pipeline.load().edits
    asked = {"width": 32, "height": 16, "steps": 2}
    (changed,) = drawn(pipeline, picture(image=file(), strength=1.0, **asked))
    assert changed.shape == (1, 16, 32, 3)
    (other,) = drawn(pipeline, picture(image=file(colour="blue"), strength=1.0, **asked))
    assert abs(changed - other).max() > 0
    (masked,) = drawn(pipeline, picture(image=file(), mask=file(mode="RGBA", colour=(0, 0, 0, 0)), **asked))
    assert masked.shape == (1, 16, 32, 3)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("image", {"image": file()[:60]}),
        ("mask", {"image": file(), "mask": b"none"}),
        ("strength", {"image": file(), "strength": 0.4}),
        ("strength", {"image": file(), "steps": 1}),
    ]
    for param, fields in wrong:
        with pytest.raises(InvalidRequest) as refused:
            drawn(pipeline, picture(**{**asked, **fields}))
        assert refused.value.param == param, fields
    assert not loaded(pixart).load().edits


def test_refusals_of_the_pipeline_reach_the_client(unet: Path) -> None:
    with pytest.raises(InvalidRequest, match="divisible by 8"):
        drawn(loaded(unet), picture(width=20))


def test_a_single_step_is_refused_where_the_pipeline_needs_more(pixart: Path) -> None:
    with pytest.raises(InvalidRequest, match="more than one step") as refused:
        drawn(loaded(pixart), picture(steps=1))
    assert refused.value.param == "num_inference_steps"


def test_clips(tmp_path: Path) -> None:
    pipeline = loaded(visual_models.latte(tmp_path / "latte"))
    info = pipeline.load()
    assert (info.makes, info.frames, info.frames_fixed) == (("video",), 16, True)
    assert not info.animates
    (clip,) = drawn(pipeline, picture(frames=16, steps=2))
    assert clip.shape == (16, 32, 32, 3)
    assert abs(clip[0] - clip[15]).max() > 0


def test_clips_that_begin_with_a_picture(tmp_path: Path) -> None:
    """A folder whose weights make videos both with and without, and one that needs a picture."""
    folder = visual_models.ltx(tmp_path / "ltx")
    pipeline = loaded(folder)
    info = pipeline.load()
    assert (info.makes, info.edits, info.animates, info.needs_image) == (("video",), False, True, False)
    assert (info.multiple, info.frames_step, info.fps) == (8, 4, 25)
    asked: dict[str, Any] = {"frames": 9, "fps": 25.0, "steps": 2}
    (plain,) = drawn(pipeline, picture(**asked))
    (red,) = drawn(pipeline, picture(image=file(), **asked))
    (blue,) = drawn(pipeline, picture(image=file(colour="blue"), **asked))
    assert plain.shape == red.shape == (9, 32, 32, 3)
    assert abs(red - blue).max() > 0
    with pytest.raises(InvalidRequest) as refused:
        drawn(pipeline, picture(image=b"none", **asked))
    assert refused.value.param == "input_reference"

    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("LTXPipeline", "LTXImageToVideoPipeline"))
    pipeline = loaded(folder)
    info = pipeline.load()
    assert (info.pipeline, info.animates, info.needs_image) == ("LTXImageToVideoPipeline", True, True)
    assert (drawn(pipeline, picture(image=file(), **asked))[0] == red).all()


def test_folders_that_are_no_pipelines(tmp_path: Path, pixart: Path) -> None:
    with pytest.raises(ModelError, match=r"model_index\.json"):
        resolve_pipeline(str(tmp_path), tmp_path)
    assert resolve_pipeline(str(pixart), tmp_path) == pixart
    (tmp_path / "model_index.json").write_bytes((pixart / "model_index.json").read_bytes())
    with pytest.raises(ModelError, match="safetensors"):
        resolve_pipeline(str(tmp_path), tmp_path)
    with pytest.raises(EngineFailure, match="cannot load"):
        loaded(tmp_path)


def test_numbers_that_are_no_picture_fail(pixart: Path) -> None:
    pipeline = loaded(pixart)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "isfinite", lambda array: np.zeros(1, bool))
        with pytest.raises(EngineFailure, match="not a picture"):
            drawn(pipeline, picture(steps=2))
