"""Bodies with images: cutting these out does not change the result, and parsing does not block the event loop."""

import asyncio
import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.chat import ChatCompletionRequest
from routers.body import parsed

LONG = "data:image/png;base64," + "QUJD/+" * 20_000
URLS = st.sampled_from(
    [
        LONG,
        LONG[:-4],
        "data:image/png;base64,QUJD",
        "https://images.test/a.png",
        LONG + '"',
        LONG + "\\",
        LONG + "é",
        "",
    ]
)
JSON = st.recursive(
    URLS | st.integers(-5, 5) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["url", "image_url", "text", "type", LONG, 'url": "']), inner, max_size=3)
    ),
    max_leaves=6,
)
IMAGE = URLS | st.fixed_dictionaries({"url": URLS}, optional={"detail": st.sampled_from(["low", "auto"]), "more": JSON})
PART = st.fixed_dictionaries(
    {"type": st.just("image_url")}, optional={"image_url": IMAGE, "text": URLS, "video_url": JSON, "more": JSON}
)
BODY = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.just("user"), "content": URLS | st.lists(PART, max_size=4)}),
            min_size=1,
            max_size=2,
        )
    },
    optional={"documents": JSON, "url": JSON, "max_tokens": st.integers(1, 9)},
)


async def outcome(raw: bytes) -> Any:
    try:
        return (await parsed(ChatCompletionRequest, raw)).model_dump()
    except RequestValidationError as error:
        return [(each["type"], each["loc"]) for each in error.errors()]


def expected(raw: bytes) -> Any:
    try:
        return ChatCompletionRequest.model_validate_json(raw).model_dump()
    except ValueError as error:
        return [(each["type"], each["loc"]) for each in error.errors()]  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(body=BODY, indent=st.sampled_from([None, 1]), plain=st.booleans(), slashes=st.booleans())
def test_bodies_are_what_they_would_be_parsed_whole(body: Any, indent: int | None, plain: bool, slashes: bool) -> None:
    text = json.dumps(body, indent=indent, ensure_ascii=plain)
    raw = (text.replace("/", "\\/") if slashes else text).encode()
    assert asyncio.run(outcome(raw)) == expected(raw)


PART_OF = '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": %s}]}]}'


@pytest.mark.parametrize(
    "body",
    [
        PART_OF % f'{{"url": "{LONG}", "url": "https://images.test"}}',
        PART_OF % f'{{"url": "https://images.test", "url": "{LONG}"}}',
        PART_OF % f'{{"url": "{LONG}"}}' + " ",
        PART_OF % f'{{"url": "{LONG}"}}' + "}",
        PART_OF % f'{{"url": "{LONG}',
        PART_OF % f'{{"url": "{LONG}"',
        PART_OF % f'{{"url" : : "{LONG}"}}',
        PART_OF % f'{{"a "url": "{LONG}"}}',
        PART_OF % f'{{"a\\"url": "{LONG}"}}',
        PART_OF % f'{{"url": "{LONG}\xff"}}',
        PART_OF % f'{{"url": "x{LONG}"}}',
        PART_OF % f'{{"url": "{LONG}" "{LONG}"}}',
        PART_OF % f'[{{"url": "{LONG}"}}]',
        PART_OF % ('{"url": "data:a"}, ' * 3000 + f'{{"url": "{LONG}"}}'),
        "[" * 300 + f'{{"url": "{LONG}"}}',
    ],
)
async def test_odd_bodies_too(body: str) -> None:
    raw = body.encode("latin-1")
    assert await outcome(raw) == expected(raw)


async def test_the_event_loop_goes_on_while_a_large_body_is_parsed() -> None:
    """Turns are counted, which a busy machine does not change."""
    urls = [LONG + "QUJD" * 300_000 + f"{index:04}" for index in range(20)]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    raw = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    work = asyncio.create_task(parsed(ChatCompletionRequest, raw))
    turns = 0
    while not work.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= len(urls)
    parts: Any = (await work).messages[0].content
    assert [part.image_url.url for part in parts] == urls
