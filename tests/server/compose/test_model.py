"""Parsers and default sampling parameters of a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineFailure
from multimodal.request import SamplingDefaults
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import CHATML
from server.compose.model import answer_format, sampling_defaults
from server.settings import Settings

OWN: dict[str, Any] = {
    "version": 1,
    "fields": {
        "thinking": {"open": "<muse>", "close": "</muse>"},
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


def names(folder: Path, template: str, own: Any = OWN, **settings: Any) -> tuple[str, str]:
    (folder / "tokenizer_config.json").write_text(json.dumps({"response_template": own}))
    found = Settings(engine="fake", model=str(folder), **settings)
    return answer_format(found, folder, ChatTemplate(template, {})).parser_names


def test_auto_takes_a_models_own_response_template_where_no_family_fits(tmp_path: Path) -> None:
    unknown, known = "{{ tools }}<do>", "{{ tools }}<|im_start|><tool_call></think>"
    own = ("response_template", "response_template")
    assert names(tmp_path, unknown) == own
    assert names(tmp_path, known) == ("hermes", "qwen3"), "of a known family, calls can be guided"
    assert names(tmp_path, "{{ tools }}<tool_call>") == own, "the family has no reasoning"
    assert names(tmp_path, known, tool_call_parser="response_template") == own
    assert names(tmp_path, unknown, tool_call_parser="none", reasoning_parser="none") == ("", "")
    assert names(tmp_path, unknown, tool_call_parser="hermes") == ("hermes", "")


def test_a_response_template_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert names(tmp_path, CHATML, {"version": 9, "fields": {}}) == ("hermes", "")
    assert "version 9" in caplog.text
    with pytest.raises(ValueError, match="response_template"):
        names(tmp_path, CHATML, None, tool_call_parser="response_template")


def test_requests_are_sampled_as_the_models_makers_do(tmp_path: Path) -> None:
    def found(generation: dict[str, Any], *refused: str, **settings: Any) -> SamplingDefaults:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return sampling_defaults(Settings(model=str(tmp_path), **settings), tmp_path, refused)

    (tmp_path / "config.json").write_text("{}")
    own = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    assert found(own) == SamplingDefaults(temperature=0.7, top_k=20, repetition_penalty=1.1)
    assert found(own, "repetition_penalty", "seed") == SamplingDefaults(temperature=0.7, top_k=20)
    assert found({}) == found(own, sampling_defaults="openai") == SamplingDefaults()
    for wrong in ({"temperature": 3.0}, {"top_p": 0}):
        with pytest.raises(EngineFailure, match="SAMPLING_DEFAULTS=openai"):
            found(wrong)
