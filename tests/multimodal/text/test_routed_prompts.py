"""Prompts in a router: the tokens that a replica would compute, as far as a router can know them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.replicas.routing.fleet import RoutedPrompt
from multimodal.text.routed_prompts import RoutedPrompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import byte_tokenizer
from routers.fields import FieldCheck
from tests.support.requests import ask_of
from tests.support.servers import application

TOKENIZER = byte_tokenizer()
assert TOKENIZER.chat_template is not None
PROMPTS = RoutedPrompts(
    "fake", TOKENIZER, ChatTemplate(TOKENIZER.chat_template, TOKENIZER.special_tokens), ("enable_thinking",)
)
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello ä"}]


async def chat(**fields: Any) -> RoutedPrompt:
    return await PROMPTS.of(
        ask_of(
            {"messages": MESSAGES, **fields}, FieldCheck(fields.get("model", "fake"), strict=False, model_optional=True)
        )
    )


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}]


@pytest.mark.parametrize(
    "fields", [{}, {"add_generation_prompt": False}, {"truncate_prompt_tokens": 7}, {"tools": TOOLS}]
)
async def test_chats_have_the_tokens_that_a_replica_gives_them(fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}
    async with application() as (client, _):
        answer = (
            await client.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True})
        ).json()
    assert list((await chat(**fields)).tokens) == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "namespace"),
    [
        ({}, ("", "")),
        ({"model": "fake"}, ("", "")),
        ({"cache_salt": "s"}, ("s", "")),
        ({"model": "adapter"}, ("", "adapter")),
    ],
)
async def test_requests_share_blocks_within_a_namespace(fields: dict[str, Any], namespace: tuple[str, str]) -> None:
    assert (await chat(**fields)).namespace == namespace


async def test_images_end_what_is_known() -> None:
    def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "Later."}, MESSAGES[1]]

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}
    found = await chat(messages=said({"type": "text", "text": "Look: "}, image, {"type": "text", "text": "and"}, image))
    assert TOKENIZER.decode(found.tokens) == "<|im_start|>user\nLook: "
    assert found.count > len(found.tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"evil": 1}},
        {"truncate_prompt_tokens": -1},
        {"messages": [{"role": "user", "content": "x" * (1 << 21)}]},
    ],
)
async def test_prompts_that_a_router_cannot_know_are_left_to_replicas(fields: dict[str, Any]) -> None:
    assert await chat(**fields) == RoutedPrompt()


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("ab", [68 + 32, 69 + 32]), ([5, 6], [5, 6]), ([[5, 6], [7]], [5, 6]), (["ab", "c"], [100, 101])],
)
async def test_completions(prompt: Any, tokens: list[int]) -> None:
    assert list((await PROMPTS.of(ask_of({"prompt": prompt}))).tokens) == tokens


@given(st.text(max_size=40), st.text(max_size=40))
async def test_no_text_is_taken_for_an_image(system: str, user: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user + "FIRST_IMAGE_OF_THE_PROMPT"}]
    found = await chat(messages=messages)
    assert "FIRST_IMAGE_OF_THE_PROMPT" in TOKENIZER.decode(found.tokens)
