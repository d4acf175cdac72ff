"""Questions about a scene in several wordings, each with its only correct answer."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from smolvision.images import COLOURS, HELD_OUT, PLACES, SHAPES, Item, Scene

COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Turn(NamedTuple):
    """A question and its answer."""

    kind: str
    question: str
    answer: str


def ask(kind: str, scene: Scene, rng: Random, *, held_out: bool = False) -> Turn | None:
    """Return a question of a kind; None if the scene has no such question. Only `held_out` ones name held-out pairs."""
    asked = _ASKS[kind](scene, rng, held_out)
    return asked and Turn(kind, *asked)


_Asked = tuple[str, str] | None


def _colour(scene: Scene, rng: Random, _: bool) -> _Asked:
    shapes = Counter(item.shape for item in scene.items)
    things = [(item.shape, item.colour) for item in scene.items if shapes[item.shape] == 1]
    if scene.writing:
        things.append(("number" if scene.writing.is_number else "word", scene.writing.colour))
    if not things:
        return None
    thing, colour = rng.choice(things)
    spelling = rng.choice(("colour", "color"))
    question = rng.choice(
        (
            f"What {spelling} is the {thing}?",
            f"Which {spelling} does the {thing} have?",
            f"Tell me the {spelling} of the {thing}.",
        )
    )
    return question, f"The {thing} is {colour}."


def _shape(scene: Scene, rng: Random, _: bool) -> _Asked:
    if len(scene.items) == 1 and rng.random() < 0.4:
        question = rng.choice(("What shape is in the image?", "Which shape is shown?", "What shape is this?"))
        return question, f"It is a {scene.items[0].shape}."
    colours = Counter(item.colour for item in scene.items)
    items = [item for item in scene.items if colours[item.colour] == 1]
    if not items:
        return None
    item = rng.choice(items)
    question = rng.choice(
        (
            f"What is the {item.colour} shape?",
            f"Which shape is {item.colour}?",
            f"What kind of shape is the {item.colour} one?",
        )
    )
    return question, f"The {item.colour} shape is a {item.shape}."


def _count(scene: Scene, rng: Random, _: bool) -> _Asked:
    if not scene.items:
        return None
    what = rng.choices(("shape", "colour", "all"), (6, 2, 2))[0]
    if what == "shape":
        present = rng.random() < 0.9
        shape = rng.choice(scene.items).shape if present else rng.choice(SHAPES)
        number, one, many = sum(item.shape == shape for item in scene.items), shape, plural(shape)
    elif what == "colour":
        colour = rng.choice(scene.items).colour
        number, one, many = sum(item.colour == colour for item in scene.items), f"{colour} shape", f"{colour} shapes"
    else:
        number, one, many = len(scene.items), "shape", "shapes"
    question = rng.choice(
        (
            f"How many {many} are there?",
            f"How many {many} do you see?",
            f"Count the {many}.",
            f"How many {many} are in the image?",
        )
    )
    return question, f"There is one {one}." if number == 1 else f"There are {COUNTS[number]} {many}."


def _exists(scene: Scene, rng: Random, held_out: bool) -> _Asked:
    """Ask for a pair that is there or, as often, for one that is not but may share its colour or shape."""
    there = {(item.colour, item.shape) for item in scene.items}
    if not there:
        return None
    if rng.random() < 0.5:
        colour, shape = rng.choice(sorted(there))
    else:
        colours = sorted({colour for colour, _ in there}) if rng.random() < 0.5 else list(COLOURS)
        shapes = sorted({shape for _, shape in there}) if rng.random() < 0.5 else list(SHAPES)
        pairs = (
            {(colour, shape) for colour in colours for shape in shapes}
            - there
            - (frozenset() if held_out else HELD_OUT)
        )
        if not pairs:
            return None
        colour, shape = rng.choice(sorted(pairs))
    thing = f"{article(colour)} {shape}"
    question = rng.choice(
        (
            f"Is there {thing}?",
            f"Do you see {thing}?",
            f"Does the image show {thing}?",
            f"Is there {thing} in the image?",
        )
    )
    answer = f"Yes, there is {thing}." if (colour, shape) in there else f"No, there is no {colour} {shape}."
    return question, answer


def _place(scene: Scene, rng: Random, _: bool) -> _Asked:
    names = [(name, item) for name, item in _names(scene) if item.cell >= 0]
    if not names:
        return None
    name, item = rng.choice(names)
    question = rng.choice(
        (f"Where is the {name}?", f"In which part of the image is the {name}?", f"Where can I find the {name}?")
    )
    return question, f"The {name} is {PLACES[item.cell]}."


def _relation(scene: Scene, rng: Random, _: bool) -> _Asked:
    """Ask only if exactly one shape lies in a column to the left (or right, or in a row above or below)."""
    found = []
    for name, item in _names(scene):
        for words, axis, sign in (("left of", 0, -1), ("right of", 0, 1), ("above", 1, -1), ("below", 1, 1)):
            others = [other for other in scene.items if other is not item and other.cell >= 0]
            away = [other for other in others if (_cell(other)[axis] - _cell(item)[axis]) * sign > 0]
            level = [other for other in others if _cell(other)[axis] == _cell(item)[axis]]
            if len(away) == 1 and not level and item.cell >= 0:
                found.append((name, words, away[0]))
    if not found:
        return None
    name, words, other = rng.choice(found)
    question = rng.choice(
        (f"What is {words} the {name}?", f"Which shape is {words} the {name}?", f"What do you see {words} the {name}?")
    )
    return question, f"{article(other.colour).capitalize()} {other.shape} is {words} the {name}."


def _number(scene: Scene, rng: Random, _: bool) -> _Asked:
    if not scene.writing or not scene.writing.is_number:
        return None
    question = rng.choice(
        ("What number is shown?", "Which number is in the image?", "What number do you see?", "Read the number.")
    )
    return question, f"The number is {scene.writing.content}."


def _word(scene: Scene, rng: Random, _: bool) -> _Asked:
    if not scene.writing or scene.writing.is_number:
        return None
    question = rng.choice(
        ("Which word is written?", "What word is in the image?", "What does the image say?", "Read the word.")
    )
    return question, f"The word is {scene.writing.content}."


def _background(scene: Scene, rng: Random, _: bool) -> _Asked:
    spelling = rng.choice(("colour", "color"))
    question = rng.choice((f"What {spelling} is the background?", f"Which {spelling} does the background have?"))
    return question, f"The background is {scene.background}."


def _describe(scene: Scene, rng: Random, _: bool) -> _Asked:
    """Describe up to three shapes in different columns from left to right, then the text."""
    columns = [item.cell % 3 for item in scene.items]
    if len(set(columns)) < len(columns):
        return None
    parts = [f"{article(item.colour)} {item.shape}" for item in sorted(scene.items, key=lambda item: item.x)]
    if writing := scene.writing:
        parts.append(f"the {'number' if writing.is_number else 'word'} {writing.content} in {writing.colour}")
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    question = rng.choice(
        ("Describe the image.", "What is in the image?", "What do you see?", "Describe this picture.")
    )
    return question, f"{listed[0].upper()}{listed[1:]} on {article(scene.background)} background."


def article(colour: str) -> str:
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour}"


def plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


def _names(scene: Scene) -> list[tuple[str, Item]]:
    """Return shapes with an unambiguous name: the shape alone if it is unique, or colour and shape."""
    shapes = Counter(item.shape for item in scene.items)
    pairs = Counter((item.colour, item.shape) for item in scene.items)
    alone = [(item.shape, item) for item in scene.items if shapes[item.shape] == 1]
    return alone + [
        (f"{item.colour} {item.shape}", item) for item in scene.items if pairs[item.colour, item.shape] == 1
    ]


def _cell(item: Item) -> tuple[int, int]:
    return item.cell % 3, item.cell // 3


_ASKS: dict[str, Callable[[Scene, Random, bool], _Asked]] = {
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "exists": _exists,
    "place": _place,
    "relation": _relation,
    "number": _number,
    "word": _word,
    "background": _background,
    "describe": _describe,
}
KINDS = tuple(_ASKS)
