"""Scenes, and their pictures of 256x256 RGB pixels. The same seed gives the same picture.

A scene has shapes at random offsets within the cells of a 3x3 grid, or one shape anywhere, and possibly a word or a
number. Colours, sizes, angles, backgrounds, gradients and noise vary. Some pairs of colour and shape are held out: they
occur only in held-out scenes.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 256
PATCH = 32
GRID = SIZE // PATCH
CELL = SIZE / 3
COLOURS = {
    "red": (215, 35, 40),
    "green": (35, 150, 60),
    "blue": (35, 75, 220),
    "yellow": (245, 220, 40),
    "orange": (250, 130, 15),
    "purple": (130, 40, 175),
    "black": (18, 18, 18),
    "white": (242, 242, 242),
    "grey": (128, 128, 128),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PLACES = (
    *("at the top left", "at the top", "at the top right"),
    *("on the left", "in the centre", "on the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
"""Places of the cells, row by row."""
WORDS = (
    "apple", "baby", "bird", "boat", "book", "bread", "bus", "cake", "camera", "car", "cat", "chair", "cloud",
    "coffee", "cow",
    "day", "desk", "dog", "door", "dream", "duck", "egg", "farm", "fire", "fish", "flag", "flower", "forest", "frog",
    "game",
    "garden", "gold", "grass", "hat", "home", "horse", "house", "ice", "jam", "key", "king", "lamp", "leaf", "lion",
    "milk",
    "moon", "music", "night", "ocean", "paper", "piano", "queen", "rain", "river", "road", "salt", "ship", "snow",
    "sun", "tree",
)  # fmt: skip
NUMBERS = tuple(str(number) for number in range(100))
HELD_OUT = frozenset(
    {
        ("red", "star"),
        ("blue", "ring"),
        ("green", "cross"),
        ("yellow", "square"),
        ("purple", "triangle"),
        ("orange", "circle"),
    }
)
"""Pairs of colour and shape that training never shows or names."""
LABELS = {
    "shape": 8,
    "colour": 10,
    "centre": 7,
    "of_shape": 10,
    "of_colour": 10,
    "text": 1 + len(NUMBERS) + len(WORDS),
    "background": 10,
    "shapes": 10,
}
"""Labels that `patch_labels` gives each patch, and their numbers of values; 0 means nothing.

The labels are the shape that covers the patch (7 is text) and its colour, the shape whose centre the patch has, the
number of shapes in the scene with that shape and with that colour, the number or word, and, for the whole scene, the
background colour and the number of shapes.
"""

SCALE = 2
"""Pictures are drawn larger by this factor and then reduced, which smooths edges."""


@dataclass(frozen=True, slots=True)
class Item:
    """A shape. Centre and diameter are in pixels, the angle in degrees; `cell` is -1 for a shape outside the grid."""

    colour: str
    shape: str
    x: float
    y: float
    size: float
    angle: float
    cell: int


@dataclass(frozen=True, slots=True)
class Writing:
    """A word or a number around a centre; `width` and `height` are its extent in pixels."""

    content: str
    colour: str
    x: float
    y: float
    font_size: int
    width: float
    height: float

    @property
    def is_number(self) -> bool:
        return self.content.isdigit()


@dataclass(frozen=True, slots=True)
class Scene:
    background: str
    items: tuple[Item, ...] = ()
    writing: Writing | None = None


def make_scene(rng: Random, *, held_out: bool = False) -> Scene:
    """Return a random scene; only a `held_out` scene may have held-out pairs."""
    background = rng.choice(list(COLOURS))
    kind = rng.choices(("one", "some", "count", "word", "number", "mixed"), (10, 26, 24, 14, 12, 14))[0]
    if kind == "one":
        size = rng.uniform(50, 190)
        x, y = (rng.uniform(size / 2 + 4, SIZE - size / 2 - 4) for _ in range(2))
        return Scene(background, (Item(*_pair(rng, background, held_out), x, y, size, angle_of(rng), -1),))
    if kind in ("word", "number"):
        return Scene(background, writing=_write(rng, background, kind == "number", (0, SIZE)))
    if kind == "mixed":
        row = rng.randrange(3)
        writing = _write(rng, background, rng.random() < 0.5, (row * CELL, row * CELL + CELL))
        free = [cell for cell in range(9) if cell // 3 != row]
        cells = rng.sample(free, rng.randint(1, 3))
        return Scene(background, tuple(_place(rng, cell, _pair(rng, background, held_out)) for cell in cells), writing)
    pairs = [_pair(rng, background, held_out) for _ in range(rng.randint(2, 5))]
    if kind == "count":
        pairs = _repeated(rng, background, held_out)
    return Scene(
        background,
        tuple(_place(rng, cell, pair) for cell, pair in zip(rng.sample(range(9), len(pairs)), pairs, strict=True)),
    )


def _repeated(rng: Random, background: str, held_out: bool) -> list[tuple[str, str]]:
    """Return one to six shapes of a kind, in one colour or several, and up to three others."""
    first = _pair(rng, background, held_out)
    same_colour = rng.random() < 0.5
    pairs = [first]
    for _ in range(rng.randint(0, 5)):
        pairs.append(first if same_colour else _pair(rng, background, held_out, first[1]))
    others = [shape for shape in SHAPES if shape != first[1]]
    return pairs + [
        _pair(rng, background, held_out, rng.choice(others)) for _ in range(rng.randint(0, min(3, 9 - len(pairs))))
    ]


def _pair(rng: Random, background: str, held_out: bool, shape: str | None = None) -> tuple[str, str]:
    pairs = [
        (colour, form)
        for colour in COLOURS
        for form in ((shape,) if shape else SHAPES)
        if colour != background and (held_out or (colour, form) not in HELD_OUT)
    ]
    rare = [pair for pair in pairs if pair in HELD_OUT]
    return rng.choice(rare) if rare and rng.random() < 0.35 else rng.choice(pairs)


def _place(rng: Random, cell: int, pair: tuple[str, str]) -> Item:
    size = rng.uniform(38, 74)
    room = (CELL - size) / 2 - 2
    x, y = (CELL * (at + 0.5) + rng.uniform(-room, room) for at in (cell % 3, cell // 3))
    return Item(*pair, x, y, size, angle_of(rng), cell)


def angle_of(rng: Random) -> float:
    return rng.uniform(-14, 14)


def _write(rng: Random, background: str, number: bool, rows: tuple[float, float]) -> Writing:
    """Return text that lies between two heights."""
    content = rng.choice(NUMBERS if number else WORDS)
    tall = rows[1] - rows[0] >= SIZE
    size = rng.randint(44, 150 if tall else 76) if number else rng.randint(32, 88 if tall else 72)
    width, height = _extent(content, size)
    while width > SIZE - 16 or height > rows[1] - rows[0] - 8:
        size -= 4
        width, height = _extent(content, size)
    x = rng.uniform(width / 2 + 5, SIZE - width / 2 - 5)
    y = rng.uniform(rows[0] + height / 2 + 3, rows[1] - height / 2 - 3)
    return Writing(
        content, rng.choice([colour for colour in COLOURS if colour != background]), x, y, size, width, height
    )


@lru_cache(maxsize=256)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return font


def _extent(content: str, size: int) -> tuple[float, float]:
    left, top, right, bottom = _font(size).getbbox(content, anchor="mm")
    return right - left, bottom - top


def render(scene: Scene, rng: Random) -> np.ndarray:
    """Return the picture, uint8 [256, 256, 3]. Tints, gradient and noise are drawn from `rng`."""
    background = tint(scene.background, rng)
    image = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), background)
    draw = ImageDraw.Draw(image)
    for item in scene.items:
        draw_item(draw, item, tint(item.colour, rng), background)
    if (writing := scene.writing) is not None:
        at = (writing.x * SCALE, writing.y * SCALE)
        bold = rng.choice((0, 0, 1, 2))
        font = _font(writing.font_size * SCALE)
        left, top, right, bottom = font.getbbox(writing.content, anchor="mm")
        middle = (at[0] - (left + right) / 2, at[1] - (top + bottom) / 2)
        draw.text(middle, writing.content, tint(writing.colour, rng), font, anchor="mm", stroke_width=bold)
    pixels = np.asarray(image.reduce(SCALE), np.int16)
    pixels = pixels + gradient(rng.randrange(6), rng.randint(0, 12))[:, :, None]
    strength = rng.randint(0, 5)
    if strength:
        pixels += noise(strength)[rng.randrange(SIZE) :, rng.randrange(SIZE) :][:SIZE, :SIZE]
    return pixels.clip(0, 255).astype(np.uint8)


def tint(colour: str, rng: Random) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, value + rng.randint(-13, 13))) for value in COLOURS[colour])
    return red, green, blue


def draw_item(
    draw: ImageDraw.ImageDraw, item: Item, colour: tuple[int, int, int], background: tuple[int, int, int]
) -> None:
    x, y, radius = item.x * SCALE, item.y * SCALE, item.size * SCALE / 2
    if item.shape in ("circle", "ring"):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), colour)
        if item.shape == "ring":
            inner = radius * 0.56
            draw.ellipse((x - inner, y - inner, x + inner, y + inner), background)
        return
    turn = math.radians(item.angle)
    sine, cosine = math.sin(turn), math.cos(turn)
    outline = OUTLINES[item.shape]
    corners = [(x + radius * (cosine * u - sine * v), y + radius * (sine * u + cosine * v)) for u, v in outline]
    draw.polygon(corners, colour)


def _rays(count: int, *radii: float) -> list[tuple[float, float]]:
    """Return points around a centre, the first above it, with the radii in rotation."""
    angles = [2 * math.pi * index / count - math.pi / 2 for index in range(count)]
    rays = [(radii[index % len(radii)], angle) for index, angle in enumerate(angles)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for radius, angle in rays]


_ARM = 0.32
OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.82, -0.82), (0.82, -0.82), (0.82, 0.82), (-0.82, 0.82)],
    "triangle": _rays(3, 1.0),
    "star": _rays(10, 1.0, 0.42),
    "cross": [(s * a, t * b) for s, t, pairs in (
        (1, -1, ((_ARM, 1), (_ARM, _ARM), (1, _ARM))),
        (1, 1, ((1, _ARM), (_ARM, _ARM), (_ARM, 1))),
        (-1, 1, ((_ARM, 1), (_ARM, _ARM), (1, _ARM))),
        (-1, -1, ((1, _ARM), (_ARM, _ARM), (_ARM, 1))),
    ) for a, b in pairs],
}  # fmt: skip
"""Corners in units of the radius, y downwards."""


@lru_cache(maxsize=128)
def gradient(direction: int, strength: int) -> np.ndarray:
    y, x = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j]
    ramp = (x, -x, y, -y, (x + y) / 2, 1 - np.hypot(x, y))[direction]
    return (ramp * strength * 1.5).astype(np.int16)


@lru_cache(maxsize=8)
def noise(strength: int) -> np.ndarray:
    """Return noise of twice a picture's size, from which pictures take a part at a random offset."""
    return np.random.default_rng(strength).normal(0, strength * 1.6, (2 * SIZE, 2 * SIZE, 3)).astype(np.int16)


def patch_labels(scene: Scene) -> np.ndarray:
    """Return labels of the patches, for training the tower alone: uint8 [8, 64], in the order of LABELS, row by row."""
    labels = {name: np.zeros((GRID, GRID), np.uint8) for name in LABELS}
    colours = {colour: index for index, colour in enumerate(COLOURS, 1)}
    for item in scene.items:
        shape = SHAPES.index(item.shape) + 1
        covered = _patches(item.x, item.y, max(item.size, PATCH * 1.02), max(item.size, PATCH * 1.02))
        labels["shape"][covered] = shape
        labels["colour"][covered] = colours[item.colour]
        labels["of_shape"][covered] = sum(other.shape == item.shape for other in scene.items)
        labels["of_colour"][covered] = sum(other.colour == item.colour for other in scene.items)
        labels["centre"][int(item.y) // PATCH, int(item.x) // PATCH] = shape
    if (writing := scene.writing) is not None:
        covered = _patches(writing.x, writing.y, writing.width + PATCH * 0.8, writing.height + PATCH * 0.8)
        labels["shape"][covered] = 7
        labels["colour"][covered] = colours[writing.colour]
        labels["text"][covered] = 1 + (*NUMBERS, *WORDS).index(writing.content)
    labels["background"][:] = colours[scene.background]
    labels["shapes"][:] = len(scene.items)
    return np.stack(list(labels.values())).reshape(len(LABELS), -1)


def _patches(x: float, y: float, width: float, height: float) -> np.ndarray:
    """Return which patches have their middle in a box around a centre."""
    middles = (np.arange(GRID) + 0.5) * PATCH
    inside: np.ndarray = (abs(middles[:, None] - y) < height / 2) & (abs(middles[None, :] - x) < width / 2)
    return inside
