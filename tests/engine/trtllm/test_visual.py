"""The adapter of TensorRT-LLM's VisualGen, on a stand-in made of `tests/contract/trtllm_visual.json`."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineFailure, InvalidRequest
from engine.trtllm import versions, visual
from engine.trtllm.visual import TrtllmVisualPipeline
from engine.visual.base import Picture, Stopped
from engine.visual.types import VisualConfig, VisualRequest
from tests.support.trtllm import NEWEST, stand_in

ROOT = Path(__file__).resolve().parents[3]
CONTRACT = json.loads((ROOT / "tests/contract/trtllm_visual.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with stand_in(NEWEST):
        from tensorrt_llm import visual_gen  # type: ignore[attr-defined]  # noqa: PLC0415

        yield visual_gen


@pytest.fixture
def library(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(versions, "found", lambda: NEWEST)
    module.VisualGen.submitted.clear()
    yield module
    module.VisualGen.release.set()


def pipeline(model: str = "flux", **arguments: Any) -> TrtllmVisualPipeline:
    return TrtllmVisualPipeline(VisualConfig(backend="trtllm", model=model, arguments=arguments))


def picture(prompt: str = "a red circle", seed: int = 1, **fields: Any) -> Picture:
    size = {"width": 32, "height": 16, "steps": 4}
    return Picture(VisualRequest(**{**size, **fields}, request_id="r", prompt=prompt, seeds=(seed,)), seed)


def no_tick(step: int, steps: int) -> None:
    pass


def test_1_2_1_is_refused_with_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("1.2.1", None):
        monkeypatch.setattr(versions, "found", lambda name=name: name)
        with pytest.raises(EngineFailure, match="ENGINE=embedded"):
            pipeline().load()


def test_the_pipeline_says_what_it_takes(library: Any) -> None:
    info = pipeline().load()
    assert (info.makes, info.width, info.height, info.steps, info.guidance) == (("image",), 32, 64, 8, 4.0)
    assert (info.edits, info.accepts) == (False, ("negative_prompt", "guidance"))
    assert pipeline("plain").load().accepts == ("negative_prompt",)
    assert pipeline("edit").load().edits
    clips = pipeline("video").load()
    assert (clips.makes, clips.frames, clips.fps, clips.animates) == (("video",), 5, 16.0, False)
    assert pipeline("video-animate").load().animates


def test_each_picture_has_its_seed(library: Any) -> None:
    made = pipeline()
    made.load()
    pixels = made.generate([picture(seed=3), picture(seed=4, negative_prompt="blue")], no_tick)
    assert [(one.shape, one.mean()) for one in pixels] == [((1, 16, 32, 3), 3), ((1, 16, 32, 3), 4)]
    assert [params.seed for _, params in library.VisualGen.submitted] == [3, 4]
    assert library.VisualGen.submitted[1][1].negative_prompt == "blue"


def test_videos(library: Any) -> None:
    made = pipeline("video")
    made.load()
    (clip,) = made.generate([picture(frames=9, fps=8.0)], no_tick)
    assert clip.shape == (9, 16, 32, 3)
    assert library.VisualGen.submitted[0][1].frame_rate == 8.0


def test_a_picture_to_change_is_a_reference(library: Any) -> None:
    made = pipeline("edit")
    made.load()
    made.generate([picture(image=b"picture")], no_tick)
    animated = pipeline("video-animate")
    animated.load()
    animated.generate([picture(image=b"first", frames=5, fps=8.0)], no_tick)
    assert [params.image_reference for _, params in library.VisualGen.submitted] == [b"picture", b"first"]


def test_parameters_that_the_pipeline_lacks_are_refused(library: Any) -> None:
    made = pipeline("plain")
    made.load()
    with pytest.raises(InvalidRequest, match="guidance_scale"):
        made.generate([picture(guidance=2.0)], no_tick)


@pytest.mark.parametrize(
    ("prompt", "error"), [("client", InvalidRequest), ("capacity", EngineFailure), ("bug", EngineFailure)]
)
def test_failures_have_their_kinds(library: Any, prompt: str, error: type[Exception]) -> None:
    made = pipeline()
    made.load()
    with pytest.raises(error):
        made.generate([picture(prompt)], no_tick)
    assert made.generate([picture()], no_tick)


def test_a_computation_that_gives_up_waiting_has_failed(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: Any, **__: Any) -> None:
        raise TimeoutError

    def stop(step: int, steps: int) -> None:
        raise Stopped

    made = pipeline()
    made.load()
    monkeypatch.setattr(library.VisualGenResult, "result", give_up)
    with pytest.raises(EngineFailure, match="gave up"):
        made.generate([picture()], stop)


def test_a_picture_that_nobody_wants_is_left_alone(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visual, "_POLL_SECONDS", 0.01)
    made = pipeline()
    made.load()
    library.VisualGen.release.clear()

    def stop(step: int, steps: int) -> None:
        assert step == 0
        raise Stopped

    with pytest.raises(Stopped):
        made.generate([picture()], stop)


def test_wrong_arguments_stop_the_start(library: Any) -> None:
    assert pipeline(cache_config={"cache_backend": "teacache"}).load()
    with pytest.raises(EngineFailure, match="cannot load flux"):
        pipeline(teacache=True).load()


def test_closing_shuts_it_down(library: Any) -> None:
    made = pipeline()
    made.close()
    made.load()
    made.close()
    made.close()


def test_the_adapter_uses_only_what_the_contract_has() -> None:
    """Names that it imports, and attributes and keywords of what the library gives."""
    tree = ast.parse((ROOT / "engine/trtllm/visual.py").read_text(encoding="utf-8"))
    imported = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == CONTRACT["module"]
        for alias in node.names
    ]
    owners = {name.split(".")[0] for name in CONTRACT["callables"]} | CONTRACT["models"].keys()
    assert imported
    assert set(imported) <= owners
    methods = {name.partition(".")[2] for name in CONTRACT["callables"]}
    known = {
        "self._generator": methods | set(CONTRACT["attributes"]["VisualGen"]),
        "default": CONTRACT["models"]["VisualGenParams"]["fields"].keys(),
        "output": set(CONTRACT["attributes"]["VisualGenOutput"]),
        "result": methods,
    }
    used = {(ast.unparse(node.value), node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {(owner, name) for owner, name in used if owner in known and name not in known[owner]} == set()
    assert known.keys() <= {owner for owner, _ in used}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parameters = CONTRACT["callables"].get(f"VisualGen.{node.func.attr}")
            if parameters is not None:
                assert {keyword.arg for keyword in node.keywords} <= set(parameters)


def test_every_behaviour_of_the_contract_has_its_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    for behaviour in CONTRACT["behaviours"]:
        assert behaviour.keys() == {"id", "fact", "source", "tests"}
        assert all(f"def {name}(" in source for name in behaviour["tests"]), behaviour["id"]
