"""Chats about one picture or two, and chats as token ids.

A chat is a list of messages as in the API, with `{"type": "image"}` parts; TEMPLATE renders it as a prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any

from tokenizers import Tokenizer

from smolvision.images import Scene, make_scene
from smolvision.questions import KINDS, Turn, article, ask

IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_ID = 49152
"""The first id after SmolLM2's vocabulary."""
IMAGE_TOKENS = 64
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""SmolLM2's chat template with content parts and without its system prompt, which would lengthen every prompt."""
FIRST_TRAINING_SEED = 1_000_000
"""Smaller seeds are held out."""
TWO_IMAGE_KINDS = ("two images", "which image")
ORDINALS = ("first", "second")

_SYSTEM_PROMPTS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
    "Answer questions about images.",
    "Answer briefly.",
)
_FACTS = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("Which planet do we live on?", "We live on the planet Earth."),
    ("What do bees make?", "Bees make honey."),
    ("What colour is the sky on a clear day?", "The sky is blue on a clear day."),
    ("What is two plus two?", "Two plus two is four."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("How many sides does a triangle have?", "A triangle has three sides."),
    ("Which animal says meow?", "A cat says meow."),
)
_NO_IMAGE = "There is no image."


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the scenes of their images in order.

    Messages alternate between user and assistant, after an optional system prompt.
    """

    scenes: tuple[Scene, ...]
    messages: tuple[dict[str, Any], ...]


def make_chat(seed: int, turns: int, *, held_out: bool = False) -> Chat:
    """Return a chat with at most `turns` questions, for training."""
    rng = Random(seed)
    kind = rng.choices(("one", "two", "text"), (80, 15, 5))[0]
    if kind == "text":
        return Chat((), tuple(_system(rng) + _messages(_text_turns(rng), {}, rng)))
    scenes = tuple(make_scene(rng, held_out=held_out) for _ in range(2 if kind == "two" else 1))
    if kind == "one":
        asked = [_about(scenes[0], rng, held_out) for _ in range(turns)]
        return Chat(scenes, tuple(_system(rng) + _messages(_distinct(asked), {0: 1}, rng)))
    if rng.random() < 0.7:  # both images come with the first question
        asked = [_about_two(scenes, rng, held_out) for _ in range(turns)]
        return Chat(scenes, tuple(_system(rng) + _messages(_distinct(asked), {0: 2}, rng)))
    before = _distinct([_about(scenes[0], rng, held_out) for _ in range(rng.randint(1, 2))])
    after = [
        _about_two(scenes, rng, held_out) if rng.random() < 0.6 else _about(scenes[1], rng, held_out)
        for _ in range(turns)
    ]
    return Chat(scenes, tuple(_system(rng) + _messages(before + _distinct(after), {0: 1, len(before): 1}, rng)))


def held_out_chats(kind: str) -> Iterator[tuple[Chat, str]]:
    """Yield an endless, fixed sequence of chats with one question of a kind, never trained on, and its answer."""
    for index in count():
        rng = Random(index * 16 + (*KINDS, *TWO_IMAGE_KINDS).index(kind))
        scenes = tuple(make_scene(rng, held_out=True) for _ in range(2 if kind in TWO_IMAGE_KINDS else 1))
        if kind in TWO_IMAGE_KINDS:
            turn = _which(scenes, rng) if kind == "which image" else _referred(scenes, rng, True)
        else:
            turn = ask(kind, scenes[0], rng, held_out=True)
        if turn:
            yield Chat(scenes, tuple(_messages([turn], {0: len(scenes)}, rng)[:-1])), turn.answer


def _about(scene: Scene, rng: Random, held_out: bool) -> Turn | None:
    return ask(rng.choices(KINDS, (10, 8, 14, 10, 12, 12, 16, 18, 5, 12))[0], scene, rng, held_out=held_out)


def _about_two(scenes: tuple[Scene, ...], rng: Random, held_out: bool) -> Turn | None:
    return _which(scenes, rng) if rng.random() < 0.25 else _referred(scenes, rng, held_out)


def _referred(scenes: tuple[Scene, ...], rng: Random, held_out: bool) -> Turn | None:
    """Return a question about one of two images, which it names."""
    which = rng.randrange(2)
    if (turn := _about(scenes[which], rng, held_out)) is None:
        return None
    question = turn.question.replace(" in the image", "").replace("the image", "it").replace("this picture", "it")
    if turn.kind == "describe":
        question = f"Describe the {ORDINALS[which]} image."
    elif rng.random() < 0.5:
        question = f"In the {ORDINALS[which]} image, {question[0].lower()}{question[1:]}"
    else:
        question = f"{question[:-1]} in the {ORDINALS[which]} image{question[-1]}"
    return Turn("two images", question, turn.answer)


def _which(scenes: tuple[Scene, ...], rng: Random) -> Turn | None:
    """Ask which image has a thing that the other one has not."""
    which = rng.randrange(2)
    own, other = (_things(scene) for scene in (scenes[which], scenes[1 - which]))
    if not (only := sorted(own - other)):
        return None
    thing = rng.choice(only)
    question = rng.choice((f"Which image has {thing}?", f"In which image is {thing}?", f"Which image shows {thing}?"))
    return Turn("which image", question, f"The {ORDINALS[which]} image has {thing}.")


def _things(scene: Scene) -> set[str]:
    things = {f"{article(item.colour)} {item.shape}" for item in scene.items}
    things |= {f"a {item.shape}" for item in scene.items}
    if writing := scene.writing:
        things.add(f"the {'number' if writing.is_number else 'word'} {writing.content}")
    return things


def _distinct(turns: list[Turn | None]) -> list[Turn]:
    """Keep one question for each answer, so that no answer can be copied from an earlier one; return at least one."""
    kept = list({turn.answer: turn for turn in turns if turn}.values())
    return kept or [Turn("none", "Are you there?", "Yes, I am here.")]


def _text_turns(rng: Random) -> list[Turn]:
    if rng.random() < 0.6:
        return [Turn("text", *fact) for fact in rng.sample(_FACTS, rng.randint(1, 4))]
    turn = _about(make_scene(rng), rng, False)
    return [Turn("no image", turn.question if turn else "Describe the image.", _NO_IMAGE)]


def _system(rng: Random) -> list[dict[str, Any]]:
    return [{"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)}] if rng.random() < 0.3 else []


def _messages(turns: list[Turn], images: dict[int, int], rng: Random) -> list[dict[str, Any]]:
    """Write turns as messages. `images` is the number of images in a question, by its index; most precede the text."""
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        parts = [{"type": "image"}] * images.get(index, 0)
        text = {"type": "text", "text": turn.question}
        content = [*parts, text] if rng.random() < 0.85 else [text, *parts]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
    return messages


class Encoder:
    """Encodes chats for training with SmolLM2's tokenizer; each image becomes IMAGE_TOKENS tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = lru_cache(maxsize=4096)(self._encode)

    def __call__(self, chat: Chat, length: int) -> tuple[list[int], list[bool]]:
        """Return at most `length` ids, cut after a complete answer, and which of them the model must predict."""
        ids: list[int] = []
        said: list[bool] = []
        for message in chat.messages:
            speaks = message["role"] == "assistant"
            pieces = [
                (f"<|im_start|>{message['role']}\n", False),
                *self._pieces(message["content"], speaks),
                ("<|im_end|>", speaks),
                ("\n", False),
            ]
            new = [(token, own) for text, own in pieces for token in self._ids(text)]
            if len(ids) + len(new) > length:
                break
            ids += [token for token, _ in new]
            said += [own for _, own in new]
        return ids, said

    def _pieces(self, content: str | list[dict[str, str]], speaks: bool) -> list[tuple[str, bool]]:
        if isinstance(content, str):
            return [(content, speaks)]
        return [(IMAGE_TOKEN if part["type"] == "image" else part["text"], speaks) for part in content]

    def _encode(self, text: str) -> tuple[int, ...]:
        return (IMAGE_TOKEN_ID,) * IMAGE_TOKENS if text == IMAGE_TOKEN else tuple(self._tokenizer.encode(text).ids)
