"""Chats about one recording, and chats as token ids.

A chat is a list of messages as in the API, with `{"type": "audio"}` parts; TEMPLATE renders it as a prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from smolaudio.questions import KINDS, Saying, Turn, ask, kinds_of, make_saying
from smolaudio.speech import Voice, make_voice, record

AUDIO_TOKEN = "<audio>"
AUDIO_TOKEN_ID = 49152
"""The first id after SmolLM2's vocabulary."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<audio>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Frequency of each kind of saying in training."""
_SAID = {"number": 22, "digits": 14, "word": 18, "words": 16, "command": 27, "nothing": 3}
"""How often each kind of saying is drawn in training."""
_SYSTEM_PROMPTS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
    "Answer questions about recordings.",
    "Answer briefly.",
)
_FACTS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("What do bees make?", "Bees make honey."),
    ("What is two plus two?", "Two plus two is four."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("Which animal says meow?", "A cat says meow."),
)
_NO_RECORDING = "There is no recording."


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, what is said in their recording, and its samples; both are None without a recording.

    Messages alternate between user and assistant, after an optional system prompt.
    """

    saying: Saying | None
    samples: np.ndarray | None
    messages: tuple[dict[str, Any], ...]


def make_chat(seed: int, turns: int, say: Callable[[str, Voice, Random], np.ndarray] = record) -> Chat:
    """Return a chat with at most `turns` questions, for training."""
    rng = Random(seed)
    saying = make_saying(rng.choices([*_SAID], [*_SAID.values()])[0], rng)
    asked = [ask(rng.choice(kinds_of(saying)), saying, rng) for _ in range(turns)]
    if rng.random() < 0.04:
        facts = [Turn("text", *fact) for fact in rng.sample(_FACTS, 2)]
        alone = facts if rng.random() < 0.6 else [Turn("text", asked[0].question, _NO_RECORDING)]
        return Chat(None, None, tuple(_system(rng) + _messages(alone, rng, False)))
    samples = say(saying.spoken, make_voice(rng), rng)
    kept = list({turn.answer: turn for turn in asked}.values())  # no answer can be copied from an earlier one
    return Chat(saying, samples, tuple(_system(rng) + _messages(kept, rng, True)))


def held_out_chats(kind: str) -> Iterator[tuple[Chat, str]]:
    """Yield an endless, fixed sequence of chats with one question of a kind, in voices that training never hears."""
    for index in count():
        rng = Random(index * 16 + KINDS.index(kind))
        saying = make_saying(rng.choice([*_SAID]), rng, held_out=True)
        if kind in kinds_of(saying):
            turn = ask(kind, saying, rng)
            samples = record(saying.spoken, make_voice(rng, held_out=True), rng)
            yield Chat(saying, samples, tuple(_messages([turn], rng, True)[:-1])), turn.answer


def _system(rng: Random) -> list[dict[str, Any]]:
    return [{"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)}] if rng.random() < 0.3 else []


def _messages(turns: list[Turn], rng: Random, recording: bool) -> list[dict[str, Any]]:
    """Write turns as messages. The recording comes with the first question, mostly before its text."""
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        text = {"type": "text", "text": turn.question}
        audio = [{"type": "audio"}] if recording and not index else []
        content = [*audio, text] if rng.random() < 0.85 else [text, *audio]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    return messages


def audio_tokens(samples: int) -> int:
    """Return how many tokens a recording of up to a window becomes: 25 a second."""
    frames = -(-samples // 160)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


class Encoder:
    """Encodes chats for training with SmolLM2's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = lru_cache(maxsize=4096)(self._encode)

    def __call__(self, chat: Chat, length: int) -> tuple[list[int], list[bool]]:
        """Return at most `length` ids, cut after a complete answer, and which of them the model must predict."""
        tokens = audio_tokens(len(chat.samples)) if chat.samples is not None else 0
        ids: list[int] = []
        said: list[bool] = []
        for message in chat.messages:
            speaks = message["role"] == "assistant"
            new: list[tuple[int, bool]] = [(token, False) for token in self._ids(f"<|im_start|>{message['role']}\n")]
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                part_ids = (AUDIO_TOKEN_ID,) * tokens if part["type"] == "audio" else self._ids(part["text"])
                new += [(token, speaks) for token in part_ids]
            new += [(token, speaks) for token in self._ids("<|im_end|>")]
            new += [(token, False) for token in self._ids("\n")]
            if len(ids) + len(new) > length:
                break
            ids += [token for token, _ in new]
            said += [own for _, own in new]
        return ids, said

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text as they follow another one."""
        return [token for word in text.split() for token in self._ids(f" {word}")]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).ids)
