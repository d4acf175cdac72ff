"""The stand-in for TensorRT-LLM in this process, and short names for what tests make with it."""

import importlib
import inspect
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from engine.base import Engine
from engine.kit import handoff, logits
from engine.kit.handoff import handoff_of
from engine.media import Encoding, MediaInput
from engine.replicas.encode_answers import EncodeAnswer, decode_answer
from engine.types import GenerateRequest, Handoff

ROOT = Path(__file__).resolve().parents[1]
API = json.loads((ROOT / "contract" / "trtllm_api.json").read_text(encoding="utf-8"))
OLDEST: str = API["version"]
NEWEST: str = json.loads((ROOT / "contract" / "trtllm_newest.json").read_text(encoding="utf-8"))["version"]
BOTH_VERSIONS = pytest.mark.parametrize("trt", [OLDEST, pytest.param(NEWEST, marks=pytest.mark.slow)], indirect=True)
"""Marks tests of the fixture `trt` that run on the stand-in of both versions, the newest in `make test-slow`."""
PROMPT = [5, 6, 7]
IMAGE = 3


@contextmanager
def stand_in(version: str = OLDEST) -> Iterator[Any]:
    """Import the package of this version in this process; child processes get it, too. The one before comes back."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "tensorrt_llm"}
    other = "tensorrt_llm" in before and before["tensorrt_llm"].__version__ != version
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "fake_trtllm"))
        patch.setenv("FAKE_TRTLLM_VERSION", version)
        if other:
            _forget()
        package = importlib.import_module("tensorrt_llm")
        assert package.__version__ == version
        yield package
        if other or version != OLDEST:
            _forget()
            sys.modules.update(before)


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@contextmanager
def registered(**factories: logits.Factory) -> Iterator[None]:
    """Register logits processors by their names for the time of the context."""
    for name, factory in factories.items():
        logits.register(name, factory)
    try:
        yield
    finally:
        for name in factories:
            logits.unregister(name)


@pytest.fixture(autouse=True)
def trt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, without faults and with short polls; nothing may live on after a test.

    It is 1.2.1, or the version that the test is parametrised with.
    """
    monkeypatch.delenv("FAKE_TRTLLM_ENGINE", raising=False)
    monkeypatch.setenv("FAKE_TRTLLM_CONFIG", json.dumps({"token_delay": 0.002}))
    with stand_in(getattr(request, "param", OLDEST)) as package:
        faults = importlib.import_module("tensorrt_llm._test")
        faults.reset()
        faults.faults.longest_poll_seconds = 0.05
        yield package
        faults.reset()
        assert faults.live() == 0


def found(name: str) -> Any:
    """An object by its dotted name; modules are imported on the way. Raises AttributeError."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for position, part in enumerate(parts[1:], 2):
        if inspect.ismodule(value):
            try:
                value = importlib.import_module(".".join(parts[:position]))
                continue
            except ModuleNotFoundError:
                pass
        value = (
            inspect.getattr_static(value, part)
            if inspect.isclass(value) and part == "__call__"
            else getattr(value, part)
        )
    return value


def llm(**arguments: Any) -> Any:
    return found("tensorrt_llm.LLM")(model="fake", **arguments)


def sampling(**fields: Any) -> Any:
    return found("tensorrt_llm.SamplingParams")(**{"end_id": 2, "max_tokens": 8, **fields})


def disaggregated(kind: str, **fields: Any) -> Any:
    return found("tensorrt_llm.llmapi.DisaggregatedParams")(request_type=kind, **fields)


def faults() -> Any:
    return found("tensorrt_llm._test").faults


def disaggregating(**arguments: Any) -> Any:
    return llm(cache_transceiver_config={"backend": "DEFAULT"}, disable_overlap_scheduler=True, **arguments)


def model_folder(folder: Path, **config: Any) -> Path:
    """Write a model into `folder`.

    It has a vocabulary of 64 words, w4 and on, an image token 3 and the end of sequence 2.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - most tests do without

    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": IMAGE, **{f"w{token}": token for token in range(4, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"vocab_size": 64, "max_position_embeddings": 4096, "eos_token_id": 2, "image_token_id": IMAGE}
    (folder / "config.json").write_text(json.dumps(known | config), encoding="utf-8")
    return folder


def picture(colour: str = "red", size: tuple[int, int] = (8, 6), form: str = "PNG") -> MediaInput:
    """A small file."""
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, form)
    return MediaInput(buffer.getvalue())


async def handed_over(engine: Engine, request: GenerateRequest) -> Handoff:
    """What the prefill of a request leaves, which the stand-in keeps although its stream is closed."""
    stream = engine.generate(replace(request, prefill_only=True))
    try:
        return handoff_of("trtllm", await anext(stream))
    finally:
        await stream.aclose()


def travelled(encoding: Encoding) -> Encoding:
    """An encoding as it arrives in the answer of /encode."""
    answer = decode_answer(handoff.encode(EncodeAnswer(version=handoff.VERSION, encoding=encoding)))
    assert answer.encoding is not None
    return answer.encoding
