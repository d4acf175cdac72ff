"""Tokenising, detokenising, stop strings and templates, by property and against the libraries that define them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from multimodal.answers.choices import StopMatcher
from multimodal.errors import RequestError
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import CHATML, Detokenizer, Tokenizer, byte_tokenizer

TEXT = "Der Fluss fließt. 日本語のテキスト 🙂🙃 naïve café 12345 \n\t def f(x): return x**2 привет мир"


def _merged() -> Tokenizer:
    """A byte-level BPE with real merges, some of which end inside a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT] * 9,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False),
    )
    return Tokenizer(backend, {})


def _fallback() -> Tokenizer:
    """A sentencepiece-like vocabulary: `▁` for spaces, bytes for what it does not know."""
    pieces = ["<eos>", "▁the", "▁", "a", "é", "▁日", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, {})


TOKENIZERS = {"bytes": byte_tokenizer(), "merged": _merged(), "fallback": _fallback()}


@pytest.mark.parametrize("name", ["bytes", "merged"])
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_increments_add_up_to_the_whole_text(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer, skip)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(TEXT + "𝄞 "), max_size=60), cut=st.integers(1, 5))
@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_characters_split_over_tokens_come_out_whole(name: str, text: str, cut: int) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [6 + byte for byte in text.encode()] if name == "fallback" else tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, True)
    pieces = [detokenizer.feed(ids[start : start + cut]) for start in range(0, len(ids), cut)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "\ufffd" not in "".join(pieces)
    assert b"".join(tokenizer.bytes_of(token) for token in ids) == text.encode()


def test_an_unfinished_character_is_held_back_and_replaced_at_the_end() -> None:
    tokenizer = TOKENIZERS["bytes"]
    detokenizer = Detokenizer(tokenizer, True)
    assert [detokenizer.feed([token]) for token in tokenizer.encode("é")] == ["", "é"]
    assert detokenizer.feed(tokenizer.encode("🙂")[:2]) == ""
    assert detokenizer.flush() == "\ufffd"


def _naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The answer over the whole text: the match that ends first, the longest if several end there."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab<", max_size=4), max_size=12),
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_may_span_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher, sent, matched = StopMatcher(stops, include), "", None
    for piece in pieces:
        ready, matched = matcher.feed(piece)
        sent += ready
        if matched is not None:
            break
    else:
        sent += matcher.flush()
    assert (sent, matched) == _naive("".join(pieces), stops, include)


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:"], False)
    assert matcher.feed("Hello\n") == ("Hello", None)
    assert matcher.feed("\nUs") == ("", None)
    assert matcher.feed("ing") == ("\n\nUsing", None)


MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": 'Say "ü"'},
    {"role": "assistant", "content": "ü it is"},
]
TEMPLATES = {
    "chatml": CHATML,
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "[{{ m.content | trim }}]\n  {% endfor %}{{ eos_token }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
    "variables": "{% if enable_thinking is defined and not enable_thinking %}<no_think>{% endif %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("prompts", [True, False])
def test_templates_render_as_transformers_renders_them(name: str, prompts: bool) -> None:
    tokenizer = byte_tokenizer()
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    expected = reference.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompts, enable_thinking=False
    )
    template = ChatTemplate(TEMPLATES[name], tokenizer.special_tokens)
    assert template.render(MESSAGES, add_generation_prompt=prompts, enable_thinking=False) == expected


_SAY = "{{ m.role[0] }}:{{ m.content }};"
TALK = [
    {"role": role, "content": text}
    for role, text in (
        *(("system", "A"), ("developer", "B"), ("user", "C"), ("user", "D")),
        *(("assistant", "E"), ("developer", "F"), ("user", "G")),
    )
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"{{% for m in messages %}}{_SAY}{{% endfor %}}", "s:A;s:B;u:C;u:D;a:E;s:F;u:G;"),
        (  # as Qwen3.5's
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + _SAY + "{% endfor %}",
            "s:A\n\nB;u:C;u:D;a:E;u:F;u:G;",
        ),
        (  # as gpt-oss's
            "{% if messages[0].role in ('developer', 'system') %}{% set m = messages[0] %}" + _SAY + "{% endif %}"
            "{% for m in messages if m.role in ('user', 'assistant') %}" + _SAY + "{% endfor %}",
            "s:A\n\nB;u:C;u:D;a:E;u:F;u:G;",
        ),
        (  # as Gemma's
            "{% if messages[0].role == 'system' %}{{ messages[0].content }};"
            "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
            "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('Conversation roles must alternate') }}{% endif %}" + _SAY + "{% endfor %}",
            "A\n\nB;u:C\n\nD;a:E;u:F\n\nG;",
        ),
    ],
)
def test_templates_get_the_roles_that_they_show(source: str, expected: str) -> None:
    template = ChatTemplate(source, {})
    assert template.render(TALK) == expected
    assert template.render(TALK[2:3]) == "u:C;"


def test_texts_beside_images_are_joined_as_texts_are() -> None:
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
        "{% endif %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ '<image>' if part.type == 'image' else part.text | trim }}{% endfor %}{% endif %};{% endfor %}"
    )
    picture = [{"type": "image"}, {"type": "text", "text": "A"}]
    contents = [picture, "B", [{"type": "text", "text": "C"}, {"type": "image"}], picture]
    text = ChatTemplate(source, {}).render([{"role": "user", "content": content} for content in contents])
    assert text == "<image>A\n\nB\n\nC<image><image>A;"


def test_a_template_that_always_needs_tools_gets_the_messages_as_they_are() -> None:
    template = ChatTemplate(f"{{% for tool in tools %}}{{% endfor %}}{{% for m in messages %}}{_SAY}{{% endfor %}}", {})
    assert template.render(TALK, tools=[{}]) == "s:A;s:B;u:C;u:D;a:E;s:F;u:G;"


def test_the_final_message_can_be_continued() -> None:
    template = ChatTemplate(CHATML, {})
    text = template.render(MESSAGES, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nü it is")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[9].content.strip() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_misbehave(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ['{"version": ', "[1]", ""])
def test_a_damaged_file_of_a_tokenizer_is_named(tmp_path: Path, name: str, content: str) -> None:
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path / name} (cannot be read|must hold a JSON object)"):
        Tokenizer.load(tmp_path)


def test_a_folder_gives_tokenizer_template_and_special_tokens(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    ).save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hé")) == "<|im_start|>hé"
    assert tokenizer.special_ids == {0, 1, 2, 259}
