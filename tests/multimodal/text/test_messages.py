"""Content parts, from the wire to what templates take, and templates of vision models."""

from typing import Any

import pytest
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from engine.config import FakeConfig
from engine.fake.engine import FakeEngine
from multimodal.errors import RequestError
from multimodal.request import Conversation, Limits, MediaRef
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import CHATML, byte_tokenizer
from protocol.chat import ChatCompletionRequest, ChatMessage
from routers.chat import convert, to_template

SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}"
    "{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN2_VL = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are helpful.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_ONLY = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
VISION = {"smolvlm": SMOLVLM, "llava": LLAVA, "qwen2-vl": QWEN2_VL}
IMAGE = {"type": "image_url", "image_url": {"url": "http://images.test/a.png", "detail": "low"}}
BARE = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}


def message(*content: dict[str, Any], role: str = "user") -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": list(content)})


def conversation_of(messages: list[ChatMessage]) -> Conversation:
    prompt = convert(ChatCompletionRequest(messages=messages)).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def text(value: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": value}


def test_images_keep_their_place() -> None:
    shown = to_template(message(text("a"), IMAGE, text("b", "input_text"), BARE, BARE, text("")))
    image = {"type": "image"}
    assert shown == {"role": "user", "content": [text("a"), image, text("b"), image, image, text("")]}


def test_texts_alone_stay_one_text() -> None:
    assert to_template(message(text("a"), text("b")))["content"] == "a\nb"
    assert to_template(ChatMessage(role="user", content="a"))["content"] == "a"
    assert to_template(ChatMessage(role="assistant", content=None))["content"] == ""
    with pytest.raises(RequestError, match="content of a user message must not be null") as caught:
        conversation_of([ChatMessage(role="user", content="a"), ChatMessage(role="user", content=None)])
    assert caught.value.param == "messages.1.content"


def test_attachments_are_in_the_order_of_all_messages() -> None:
    conversation = [
        message(text("s"), role="system"),
        message(text("a"), IMAGE, BARE),
        ChatMessage(role="assistant", content="c"),
        message({"type": "image_url", "image_url": {"url": "u", "detail": None}}, role="tool"),
        message({"type": "image_url", "image_url": {"url": "v", "detail": "original"}}),
    ]
    assert conversation_of(conversation).media == [
        MediaRef("http://images.test/a.png", "low", "messages.1.content.1.image_url"),
        MediaRef("data:image/png;base64,AAAA", "auto", "messages.1.content.2.image_url"),
        MediaRef("u", "auto", "messages.3.content.0.image_url"),
        MediaRef("v", "auto", "messages.4.content.0.image_url"),
    ]


async def test_a_text_model_refuses_images_by_name() -> None:
    engine = FakeEngine(FakeConfig())
    await engine.start()
    info = engine.info
    await engine.close()
    prompts = Prompts(byte_tokenizer(), ChatTemplate(CHATML, {}))
    ask = convert(ChatCompletionRequest(messages=[message(text("a"), IMAGE)]))
    with pytest.raises(RequestError, match="takes text only; a message has images") as caught:
        await prompts.tokens(ask, info, Limits())
    assert (caught.value.param, caught.value.code) == ("messages", "unsupported_content")


REFUSED = [
    {"type": "file", "file": {"file_id": "file-1"}},
]


@pytest.mark.parametrize("part", REFUSED, ids=lambda part: part["type"])
def test_other_media_are_refused_by_name(part: dict[str, Any]) -> None:
    for content in ((part,), (text("a"), part), (IMAGE, part), (part, text("a"))):
        with pytest.raises(RequestError, match=part["type"]) as caught:
            to_template(message(*content))
        assert caught.value.code == "unsupported_content"


@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "input_image", "image_url": "u"}, {"type": "x" * 9000}, {"type": ""}]
)
def test_unknown_parts_are_refused_without_repeating_them(part: dict[str, Any]) -> None:
    param = "messages.3.content.1.type"
    for other in (text("a"), IMAGE):
        with pytest.raises(RequestError, match=r"must be text, .* or input_audio, not") as caught:
            to_template(message(other, part), 3)
        assert str(caught.value).startswith(f"'{param}'") and part["type"][:30] in str(caught.value)
        assert (caught.value.param, caught.value.code) == (param, "unsupported_content")
        assert len(str(caught.value)) <= 200


@pytest.mark.parametrize(
    ("part", "url"),
    [
        ({"type": "audio_url", "audio_url": {"url": "http://sounds.test/a.wav"}}, "http://sounds.test/a.wav"),
        ({"type": "audio_url", "audio_url": "data:audio/mpeg;base64,AAAA"}, "data:audio/mpeg;base64,AAAA"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}, "data:audio/mp3;base64,AAAA"),
    ],
)
def test_audio_comes_by_url_or_as_it_is(part: dict[str, Any], url: str) -> None:
    body = ChatCompletionRequest(messages=[message(text("a"), part, IMAGE)])
    asked = convert(body).prompt
    assert isinstance(asked, Conversation)
    assert [one["type"] for one in asked.messages[0]["content"]] == ["text", "audio", "image"]
    found = asked.media[0]
    assert (found.url, found.kind, found.param) == (url, "audio", f"messages.0.content.1.{part['type']}")


@pytest.mark.parametrize("image", [None, "", {"url": ""}])
def test_an_image_needs_a_url(image: Any) -> None:
    with pytest.raises(RequestError, match="no URL") as caught:
        to_template(message(text("a"), {"type": "image_url", "image_url": image}), 3)
    assert caught.value.param == "messages.3.content.1.image_url"


@pytest.mark.parametrize("kind", ["text", "input_text", "refusal"])
def test_a_text_part_needs_a_text(kind: str) -> None:
    with pytest.raises(RequestError, match=r"'messages\.3\.content\.1' has no text") as caught:
        to_template(message(text("a"), {"type": kind}), 3)
    assert caught.value.param == f"messages.3.content.1.{'refusal' if kind == 'refusal' else 'text'}"


@pytest.mark.parametrize(
    "image", [{"url": "u", "detail": "ultra"}, {"url": 5}, {}, 5, ["u"], {"url": "u", "detail": 1}]
)
def test_malformed_images_are_refused(image: Any) -> None:
    with pytest.raises(ValidationError):
        message({"type": "image_url", "image_url": image})


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [text("What is "), {"type": "image"}, text("and"), {"type": "image"}]},
    {"role": "assistant", "content": "Two cats"},
    {"role": "user", "content": "Sure?"},
]


def _parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [m | {"content": [text(m["content"])] if isinstance(m["content"], str) else m["content"]} for m in messages]


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("name", VISION)
def test_vision_templates_render_as_transformers_renders_them(name: str, prompts: bool) -> None:
    """Every content is a list of parts, as these models were trained; texts alone render the same."""
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend)
    expected = reference.apply_chat_template(
        _parts(MESSAGES), chat_template=VISION[name], tokenize=False, add_generation_prompt=prompts
    )
    rendered = ChatTemplate(VISION[name], {}).render(MESSAGES, add_generation_prompt=prompts)
    assert rendered == expected
    assert all(words in rendered for words in ("Be brief.", "What is ", "Two cats", "Sure?"))
    assert rendered.count("<image>") + rendered.count("<|image_pad|>") == 2


@pytest.mark.parametrize("name", VISION)
def test_the_final_message_can_be_continued_with_images_before(name: str) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend)
    expected = reference.apply_chat_template(
        _parts(MESSAGES[:3]), chat_template=VISION[name], tokenize=False, continue_final_message=True
    )
    rendered = ChatTemplate(VISION[name], {}).render(
        MESSAGES[:3], continue_final_message=True, add_generation_prompt=False
    )
    assert rendered == expected and rendered.endswith("Two cats")


@pytest.mark.parametrize("name", VISION)
def test_a_message_that_ends_with_text_after_an_image_can_be_continued(name: str) -> None:
    content = [{"type": "image"}, text("It shows")]
    rendered = ChatTemplate(VISION[name], {}).render(
        [{"role": "assistant", "content": content}], continue_final_message=True
    )
    assert rendered.endswith("It shows")
    assert content == [{"type": "image"}, text("It shows")], "the message itself is left as it was"
    with pytest.raises(RequestError, match="cannot be continued"):
        ChatTemplate(VISION[name], {}).render([{"role": "user", "content": content[::-1]}], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "wants"),
    [(TEXT_ONLY, False), (CHATML, False), (QWEN2_VL, False), (SMOLVLM, True), (LLAVA, True), ("constant", False)],
)
def test_only_templates_that_read_lists_alone_get_texts_as_lists(source: str, wants: bool) -> None:
    assert ChatTemplate(source, {}).wants_parts is wants


def test_a_text_template_shows_no_images() -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        ChatTemplate(TEXT_ONLY, {}).render(MESSAGES)
