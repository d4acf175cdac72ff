"""Prompts, and pictures or clips that they describe. The same seed gives the same ones.

Pictures are smolvision's scenes without writing: one to five shapes on a background. A prompt says which shapes there
are, of which colour, and may say their number, size, place or relation. In a clip, each shape moves, grows or shrinks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from zlib import crc32

import numpy as np

from smolvision.images import CELL, COLOURS, PLACES, SHAPES, SIZE, Item, Scene
from smolvision.questions import COUNTS, article, plural

FIRST_TRAINING_SEED = 1_000_000
"""Smaller seeds are held out."""
MOST_ITEMS = 5
RELATIONS = {
    (1, -1): ("above", "over"),
    (1, 1): ("below", "under"),
    (0, -1): ("left of", "to the left of"),
    (0, 1): ("right of", "to the right of"),
}
"""Wordings by axis (0 is x) and sign of the first shape's place relative to the second's."""
MOTIONS = {
    "right": ("moves right", "moves to the right", "moving right"),
    "left": ("moves left", "moves to the left", "moving left"),
    "up": ("moves up", "moving up", "rises"),
    "down": ("moves down", "moving down", "falls"),
    "grow": ("grows", "growing", "gets bigger"),
    "shrink": ("shrinks", "shrinking", "gets smaller"),
}
BIG, SMALL = 138.0, 78.0
"""A big shape's diameter is larger than the one, a small shape's is smaller than the other."""

_OPENINGS = ("a picture of ", "an image of ", "a drawing of ", "draw ", "show ")
_SIZES = {"big": ("big", "large"), "small": ("small", "little", "tiny")}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A prompt and a picture that it describes, or a clip's first and last pictures."""

    kind: str
    prompt: str
    scene: Scene
    size: str = ""
    """The only shape's size in the prompt: "big", "small" or nothing."""
    places: bool = False
    """Whether the prompt says where each shape is."""
    relation: tuple[int, int] | None = None
    """Axis and sign: where the first shape is, relative to the second."""
    motions: tuple[str, ...] = ()
    """Motion of each shape of a clip: a key of MOTIONS."""
    last: Scene | None = None
    """The clip's last picture."""

    @property
    def held_out(self) -> bool:
        """Whether training never shows or names these shapes, in their colours and any number, on this background."""
        shapes = sorted({f"{item.colour} {item.shape}" for item in self.scene.items})
        return crc32(f"{', '.join(shapes)} on {self.scene.background}".encode()) % 8 == 0


def make_drawing(rng: Random, *, held_out: bool = False) -> Drawing:
    """Return a random picture's prompt, of those that are held out or of those for training."""
    while True:
        kind = rng.choices(list(_PICTURES), [weight for weight, _ in _PICTURES.values()])[0]
        background = _background(rng)
        drawing = _PICTURES[kind][1](rng, background)
        if drawing.held_out == held_out:
            return replace(drawing, kind=kind, prompt=_dressed(rng, drawing.prompt, background))


def make_clip(rng: Random, *, held_out: bool = False) -> Drawing:
    """Return a random clip's prompt, of those that are held out or of those for training."""
    while True:
        clip = _clip(rng)
        if clip.held_out == held_out:
            return clip


def _clip(rng: Random) -> Drawing:
    background = _background(rng)
    number = rng.choices((1, 2), (65, 35))[0]
    pairs = _pairs(rng, background, number)
    motions = [rng.choice(list(MOTIONS) if number == 1 else list(MOTIONS)[:4]) for _ in pairs]
    spans = [_span(rng, motion, lane, number) for lane, motion in enumerate(motions)]
    first, last = (
        tuple(Item(*pair, *span[end], angle, -1) for pair, span, angle in zip(pairs, spans, angles, strict=True))
        for angles in [[_angle(rng) for _ in pairs]]
        for end in (0, 1)
    )
    said = [f"{_thing(rng, *pair)} {rng.choice(MOTIONS[motion])}" for pair, motion in zip(pairs, motions, strict=True)]
    return Drawing(
        "two move" if number == 2 else motions[0],
        _dressed(rng, " and ".join(said), background),
        Scene(background, first),
        motions=tuple(motions),
        last=Scene(background, last),
    )


def _one(rng: Random, background: str) -> Drawing:
    (pair,) = _pairs(rng, background, 1)
    size = rng.choice(("", "", "big", "small"))
    diameter = rng.uniform(*{"": (88, 128), "big": (150, 200), "small": (52, 68)}[size])
    x, y = (rng.uniform(diameter / 2 + 4, SIZE - diameter / 2 - 4) for _ in range(2))
    scene = Scene(background, (Item(*pair, x, y, diameter, _angle(rng), -1),))
    return Drawing("", _thing(rng, *pair, rng.choice(_SIZES[size]) if size else ""), scene, size=size)


def _place(rng: Random, background: str) -> Drawing:
    cells = rng.sample(range(9), rng.choice((1, 1, 2)))
    pairs = _pairs(rng, background, len(cells))
    said = [f"{_thing(rng, *pair)} {PLACES[cell]}" for pair, cell in zip(pairs, cells, strict=True)]
    return Drawing("", " and ".join(said), _in_cells(rng, background, pairs, cells), places=True)


def _several(rng: Random, background: str) -> Drawing:
    pairs = _pairs(rng, background, rng.choice((2, 2, 3)))
    *first, last = (_thing(rng, *pair) for pair in pairs)
    return Drawing("", f"{', '.join(first)} and {last}", _in_cells(rng, background, pairs))


def _relation(rng: Random, background: str) -> Drawing:
    pairs = _pairs(rng, background, 2)
    axis, sign = relation = rng.choice(list(RELATIONS))
    near, far = rng.uniform(0.24, 0.31) * SIZE, rng.uniform(0.69, 0.76) * SIZE
    middle = rng.uniform(0.3, 0.7)
    items = []
    for pair, along in zip(pairs, (near, far) if sign < 0 else (far, near), strict=True):
        across = (middle + rng.uniform(-0.06, 0.06)) * SIZE
        x, y = (along, across) if axis == 0 else (across, along)
        items.append(Item(*pair, x, y, rng.uniform(72, 100), _angle(rng), -1))
    first, second = (_thing(rng, *pair) for pair in pairs)
    words = rng.choice(RELATIONS[relation])
    return Drawing("", f"{first} {words} {second}", Scene(background, tuple(items)), relation=relation)


def _count(rng: Random, background: str) -> Drawing:
    (pair,) = _pairs(rng, background, 1)
    number = rng.randint(2, MOST_ITEMS)
    said = f"{rng.choice((COUNTS[number], COUNTS[number], str(number)))} {_grey(rng, pair[0])} {plural(pair[1])}"
    return Drawing("", said, _in_cells(rng, background, [pair] * number))


_PICTURES: dict[str, tuple[int, Callable[[Random, str], Drawing]]] = {
    "one": (16, _one),
    "place": (18, _place),
    "several": (22, _several),
    "relation": (24, _relation),
    "count": (20, _count),
}
"""Kinds of pictures: how often each is made, and how."""
KINDS = tuple(_PICTURES)


def _pairs(rng: Random, background: str, number: int) -> list[tuple[str, str]]:
    """Return different pairs of colour and shape."""
    found: list[tuple[str, str]] = []
    while len(found) < number:
        pair = (rng.choice(_COLOURS), rng.choice(SHAPES))
        if pair[0] != background and pair not in found:
            found.append(pair)
    return found


_COLOURS = tuple(COLOURS)


def _background(rng: Random) -> str:
    return "white" if rng.random() < 0.3 else rng.choice(_COLOURS)


def _in_cells(rng: Random, background: str, pairs: list[tuple[str, str]], cells: list[int] | None = None) -> Scene:
    items = []
    for pair, cell in zip(pairs, cells or rng.sample(range(9), len(pairs)), strict=True):
        size = rng.uniform(60, 80)
        room = (CELL - size) / 2 - 2
        x, y = (CELL * (at + 0.5) + rng.uniform(-room, room) for at in (cell % 3, cell // 3))
        items.append(Item(*pair, x, y, size, _angle(rng), cell))
    return Scene(background, tuple(items))


def _span(rng: Random, motion: str, lane: int, lanes: int) -> list[tuple[float, float, float]]:
    """Return a shape's x, y and diameter at the beginning and the end of a clip.

    Each of two shapes has a lane of its own, one above the other.
    """
    if motion in ("grow", "shrink"):
        x, y = (rng.uniform(104, SIZE - 104) for _ in range(2))
        ends = [(x, y, rng.uniform(54, 68)), (x, y, rng.uniform(140, 190))]
        return ends if motion == "grow" else ends[::-1]
    size = rng.uniform(66, 100) if lanes == 1 else rng.uniform(58, 70)
    margin = size / 2 + 6
    top, bottom = lane * SIZE / lanes + margin, (lane + 1) * SIZE / lanes - margin
    if motion in ("left", "right"):
        y = rng.uniform(top, bottom)
        ends = [(rng.uniform(margin, margin + 24), y, size), (SIZE - rng.uniform(margin, margin + 24), y, size)]
        return ends if motion == "right" else ends[::-1]
    x = rng.uniform(margin, SIZE - margin)
    slack = (bottom - top) / 8
    ends = [(x, top + rng.uniform(0, slack), size), (x, bottom - rng.uniform(0, slack), size)]
    return ends if motion == "down" else ends[::-1]


def _angle(rng: Random) -> float:
    return rng.uniform(-10, 10)


def _thing(rng: Random, colour: str, shape: str, size: str = "") -> str:
    words = f"{size} {_grey(rng, colour)} {shape}".strip()
    return words if rng.random() < 0.06 else article(words)


def _grey(rng: Random, colour: str) -> str:
    return "gray" if colour == "grey" and rng.random() < 0.3 else colour


def _dressed(rng: Random, said: str, background: str) -> str:
    """Return a whole prompt. Without a word about it, the background is white."""
    opening = rng.choice(_OPENINGS) if rng.random() < 0.25 else ""
    colour = _grey(rng, background)
    forms = (f" on {article(colour)} background", f" on {colour}", f", {colour} background")
    ending = rng.choices((*forms, ""), (60, 20, 10, 60 if background == "white" else 0))[0]
    return f"{opening}{said}{ending}{'.' if rng.random() < 0.1 else ''}"


def vocabulary() -> list[str]:
    """Return all words of prompts."""
    rng = Random(0)
    made = [make(rng).prompt for _ in range(4000) for make in (make_drawing, make_clip)]
    return sorted({word for prompt in made for word in prompt.replace(",", "").rstrip(".").split()})


def table(scenes: Sequence[Scene]) -> np.ndarray:
    """Return what `render.Renderer` draws: float32 [scenes, 1 + MOST_ITEMS, 6], the background's colour and the shapes.

    A row has shape and colour (their indices), x, y and diameter in smolvision's pixels, and the angle in degrees. Rows
    without a shape have diameter 0.
    """
    rows = np.zeros((len(scenes), 1 + MOST_ITEMS, 6), np.float32)
    for index, scene in enumerate(scenes):
        rows[index, 0, 1] = _COLOURS.index(scene.background)
        for place, item in enumerate(scene.items, 1):
            kind = SHAPES.index(item.shape), _COLOURS.index(item.colour)
            rows[index, place] = (*kind, item.x, item.y, item.size, item.angle)
    return rows


def clip_table(clips: Sequence[Drawing]) -> np.ndarray:
    """Return the first and last pictures of clips: float32 [clips, 2, 1 + MOST_ITEMS, 6]."""
    ends = [table([clip.scene for clip in clips]), table([clip.last for clip in clips if clip.last])]
    return np.stack(ends, 1)
