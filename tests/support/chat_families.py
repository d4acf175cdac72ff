"""Small tokenizers and templates like those of five families of chat models.

The templates are written for these tests after the formats that the models' cards document: the same control tokens in
the same places, with the string functions that the originals apply to contents. Tokenizers are trained here on a few
lines; each has its family's pre-tokenizer, normalizer and way of keeping special tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from multimodal.text.control import ControlTokens
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer

# Qwen2-VL and Qwen3: thoughts of earlier turns are cut off, tool calls and answers are tagged.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' ~ call.function.name ~ \'", "arguments": \' ~ call.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}{{ message.name + ': ' if message.name }}"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{{ '<|image|>' if part.type == 'image' else part.text | trim }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '<|python_tag|>' + call.function | tojson }}{% endfor %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The system prompt is the start of the first user turn, and every part is trimmed and joined to the next.
GEMMA = (
    "{{ bos_token }}{% set ns = namespace(prefix='') %}"
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{% set ns.prefix = message.content + '\n\n' %}{% else %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + ns.prefix }}{% set ns.prefix = '' %}"
    "{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part.text | trim }}{% endif %}{% endfor %}"
    "{% endif %}{{ message.tool_calls | string if message.tool_calls }}{{ '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif message.role == 'user' %}[INST]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '[IMG]' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}[/INST]"
    "{% elif message.role == 'tool' %}"
    '{{ \'[TOOL_RESULTS]{"content": \' + message.content | tojson + \', "call_id": "\' + message.tool_call_id[-9:] }}'
    "{{ '\"}[/TOOL_RESULTS]' }}"
    "{% elif message.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in message.tool_calls %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id[-9:] + '\"}' }}{{ ', ' if not loop.last }}"
    "{% endfor %}{{ ']' + eos_token }}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% endif %}"
    "{% endfor %}{% for message in messages %}{% if message.role == 'user' %}{{ '<｜User｜>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{% elif message.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}"
    "{% elif message.role == 'assistant' %}{{ '<｜Assistant｜>' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson }}"
    "{{ '<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

GPT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern of Llama 3's and Qwen's pre-tokenizers, in short."""
LINES = (
    "What colour is the sky over Zürich at noon? It is blue, mostly: def sky(x): return x < 3 or x > 4",
    "<|im_start|>system\n<|im_end|> <|start_header_id|> <start_of_turn>user <｜User｜> [INST] [/INST] <image> <think>",
)
THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Chats:
    """A tokenizer and its template."""

    tokenizer: Tokenizer
    source: str
    image: str
    """The token that the template writes for an image."""

    @cached_property
    def control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer, self.tokenizer.special_texts | {self.image})

    @cached_property
    def plain(self) -> ChatTemplate:
        """The template without marks."""
        return ChatTemplate(self.source, self.tokenizer.special_tokens)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.source, self.tokenizer.special_tokens, self.control)


def _bytes(special: Sequence[str], *, in_vocabulary: bool = False, nfc: bool = False) -> Backend:
    """A byte-level BPE. With `in_vocabulary` its model knows the special tokens, and takes whole words as they are."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special) if in_vocabulary else [],
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    if in_vocabulary:
        backend.model.ignore_merges = True
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in THINK])
    return backend


def _pieces(special: Sequence[str]) -> Backend:
    """A BPE as converted from sentencepiece: `▁` for spaces, bytes for what it does not know, special tokens in the
    vocabulary.
    """
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = [*special, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=pieces, initial_alphabet=list("<>[]/_"), show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    # Only these are special; the trainer made all of `pieces` so.
    vocabulary, merges = _model(backend)
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    fresh = Backend(model)
    fresh.normalizer, fresh.pre_tokenizer, fresh.decoder = backend.normalizer, backend.pre_tokenizer, backend.decoder
    fresh.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*special, "<unk>")])
    fresh.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("\n", *THINK)])
    return fresh


def _model(backend: Backend) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@cache
def family(name: str) -> Chats:
    match name:
        case "chatml":
            special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
            backend = _bytes([*special, "<|image_pad|>"], nfc=True)
            return Chats(Tokenizer(backend, {"eos_token": "<|im_end|>"}), CHATML, "<|image_pad|>")
        case "llama 3":
            special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
            names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
            return Chats(Tokenizer(_bytes([*special, "<|image|>"]), names), LLAMA_3, "<|image|>")
        case "gemma":
            special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"]
            names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
            return Chats(Tokenizer(_pieces(special), names), GEMMA, "<start_of_image>")
        case "mistral":
            special = ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]"]
            special += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[IMG]"]
            names = {"bos_token": "<s>", "eos_token": "</s>"}
            return Chats(Tokenizer(_bytes(special, in_vocabulary=True), names), MISTRAL, "[IMG]")
        case "deepseek":
            tools = ["call▁begin", "call▁end", "sep", "output▁begin", "output▁end"]
            special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
            special += [f"<｜tool▁{name}｜>" for name in tools]
            names = {"bos_token": special[0], "eos_token": special[1]}
            backend = _bytes(special)
            backend.add_tokens([AddedToken("<image>", special=False, normalized=False)])
            return Chats(Tokenizer(backend, names), DEEPSEEK, "<image>")
    raise ValueError(name)


FAMILIES = ("chatml", "llama 3", "gemma", "mistral", "deepseek")
