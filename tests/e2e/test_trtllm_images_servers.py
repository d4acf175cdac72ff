"""Whole servers on TensorRT-LLM's backend with images.

In some the engine encodes images itself; in others encode, prefill and decode are separate replicas.
"""

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.disaggregated import SECRET
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import python_path
from tests.support.servers import ServerProcess, serving
from tests.support.vision_models import build_llava, image_bytes

ENVIRONMENT = {"PYTHONPATH": python_path(FAKE_TRTLLM), "FAKE_TRTLLM_CONFIG": json.dumps({"token_delay": 0.001})}
ROWS = 16
"""What the stand-in makes of an image."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def flags(model: Path) -> tuple[str, ...]:
    return ("--engine", "trtllm", "--model", str(model), "--served-model-name", "seeing", "--internal-secret", SECRET)


@pytest.fixture(scope="module")
def alone(flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    with serving(*flags, environment=ENVIRONMENT) as server:
        yield server


@pytest.fixture(scope="module")
def prefill(flags: tuple[str, ...]) -> Iterator[ServerProcess]:
    with serving(*flags, "--disaggregation-mode", "prefill", environment=ENVIRONMENT) as server:
        yield server


def url_of(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(image_bytes(seed=seed)).decode()


def messages(*seeds: int) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": url_of(seed)}} for seed in seeds]
    return [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look at "}, *parts, {"type": "text", "text": " and say."}],
        }
    ]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def answer(server: ServerProcess, *seeds: int) -> tuple[str | None, int]:
    """What it says, and how long the prompt was."""
    with client_of(server) as client:
        said = client.chat.completions.create(model="seeing", messages=messages(*seeds), max_tokens=24, temperature=0)
    assert said.usage is not None
    return said.choices[0].message.content, said.usage.prompt_tokens


def test_the_engine_encodes_by_itself(alone: ServerProcess) -> None:
    answers = [answer(alone, *seeds) for seeds in ((1,), (2,), (1,), (1, 2), (2, 1))]
    assert answers[0] == answers[2] and len({text for text, _ in answers}) == 4
    assert [count - answers[0][1] for _, count in answers] == [0, 0, 0, ROWS, ROWS], (
        "usage counts what the prompt came to"
    )
    asked: dict[str, Any] = {
        "messages": messages(1),
        "max_tokens": 24,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    with client_of(alone) as client:
        chunks = list(client.chat.completions.create(model="seeing", stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answers[0][0]
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == answers[0][1]


def test_a_wrong_image_is_the_users_mistake(alone: ServerProcess) -> None:
    broken = "data:image/png;base64," + base64.b64encode(image_bytes()[:60]).decode()
    chat: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": broken}}]}]
    with client_of(alone) as client, pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="seeing", messages=chat, max_tokens=4)
    assert answer(alone, 1)[0]


@pytest.mark.parametrize("encode", [False, True], ids=["P-D", "E-P-D"])
def test_prefill_and_encode_replicas_say_the_same(
    alone: ServerProcess, prefill: ServerProcess, flags: tuple[str, ...], encode: bool
) -> None:
    with ExitStack() as stack:
        more: tuple[str, ...] = ()
        if encode:
            encoder = stack.enter_context(serving(*flags, "--disaggregation-mode", "encode", environment=ENVIRONMENT))
            more = ("--encode-urls", encoder.url)
        front = stack.enter_context(
            serving(
                *flags, "--disaggregation-mode", "decode", "--prefill-urls", prefill.url, *more, environment=ENVIRONMENT
            )
        )
        for seeds in ((1,), (2, 1), (1, 2)):
            assert answer(front, *seeds) == answer(alone, *seeds)
        with client_of(front) as client:
            said = client.chat.completions.create(
                model="seeing", messages=messages(1), n=2, max_tokens=24, temperature=0
            )
            tokens = client.post("/tokenize", cast_to=httpx.Response, body={"messages": messages(1)}).json()
        assert [choice.message.content for choice in said.choices] == [answer(alone, 1)[0]] * 2
        assert tokens["count"] < answer(alone, 1)[1], "how long a prompt gets the engine says, when it has it"
        front.wait_metric("trtllm_prefill_requests_total", 5)
        if encode:
            front.wait_metric("trtllm_encode_requests_total", 1)  # the engine encodes several images of a prompt
