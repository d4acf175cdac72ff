"""smolvideo as it is served: files of clips go in, right answers come out."""

import base64
import itertools
from collections.abc import Iterator
from random import Random

import pytest

from smolvideo.chats import held_out_chats
from smolvideo.evaluate import video_file
from smolvision.measure import normal
from tests.support.disaggregated import servers
from tests.support.pictures import ask, said
from tests.support.servers import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def smolvideo(smollm2: object) -> Iterator[ServerProcess]:
    flags = ("--engine", "embedded", "--engine-process", "false", "--model", "smolvideo", "--max-seq-len", "1024")
    with servers(flags) as (running,):
        yield running


ASKED = {"mover": "mp4", "direction": "webm", "bounces": "mp4", "faster": "webm", "describe": "mp4"}
"""Kinds of questions, each about a clip in a file of this kind."""


def test_held_out_questions_about_files(smolvideo: ServerProcess) -> None:
    right = 0
    for kind, extension in ASKED.items():
        ((chat, expected),) = itertools.islice(held_out_chats(kind), 1)
        url = f"data:video/{extension};base64,{base64.b64encode(video_file(chat, Random(1), extension)).decode()}"
        question = chat.messages[-1]["content"][-1]
        content = [{"type": "video_url", "video_url": {"url": url}}, question]
        answer = ask(smolvideo, {"role": "user", "content": content}, max_tokens=48, temperature=0)
        right += normal(said(answer)) == normal(expected)
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 8 * 16
    assert right >= len(ASKED) - 1
