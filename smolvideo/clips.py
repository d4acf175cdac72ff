"""Clips of moving shapes, and their frames of 256x256 RGB pixels. The same seed gives the same clip.

A clip has one to four shapes of different kinds and colours. What happens in it is one of PLOTS: shapes move, race,
bounce, appear, disappear, change their colour or their size. Time runs from 0 to 1 over the clip. All that happens is
slow enough to be seen in eight frames. The pairs of colour and shape that smolvision never saw are held out here too.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from smolvision.images import (
    CELL,
    COLOURS,
    HELD_OUT,
    SCALE,
    SHAPES,
    SIZE,
    Item,
    angle_of,
    draw_item,
    gradient,
    noise,
    tint,
)

PLOTS = ("move", "race", "bounce", "appear", "disappear", "recolour", "resize")
_WEIGHTS = (14, 24, 28, 8, 14, 4, 8)
"""Frequency of each plot: highest for those that are learned last."""
DIRECTIONS = {
    (1, 0): "to the right", (-1, 0): "to the left", (0, 1): "down", (0, -1): "up",
    (1, 1): "down and to the right", (-1, 1): "down and to the left",
    (1, -1): "up and to the right", (-1, -1): "up and to the left",
}  # fmt: skip
_EDGE = 6
"""Pixels between a shape and the edge of the picture."""


@dataclass(frozen=True, slots=True)
class Track:
    """One shape over time."""

    colour: str
    shape: str
    points: tuple[tuple[float, float, float], ...]
    """Times and centres; the shape moves in straight lines between them."""
    size: float
    angle: float
    direction: str = ""
    """Direction of the motion; empty for a shape that stands still, or bounces."""
    speed: float = 0.0
    """Pixels that it moves during the clip."""
    bounces: int = 0
    begin: float = 0.0
    """Times at which the shape appears and disappears."""
    end: float = 2.0
    later: str = ""
    """The colour that it has from `change` on, if that is not its first."""
    change: float = 2.0
    last_size: float = 0.0
    """The size at the end, if it grows or shrinks."""

    def item(self, time: float) -> Item | None:
        """Return the shape as it is at a time, or None."""
        if not self.begin <= time < self.end:
            return None
        times, xs, ys = zip(*self.points, strict=True)
        x, y = float(np.interp(time, times, xs)), float(np.interp(time, times, ys))
        size = self.size + (self.last_size - self.size) * time if self.last_size else self.size
        colour = self.later if time >= self.change else self.colour
        return Item(colour, self.shape, x, y, size, self.angle, -1)

    @property
    def moves(self) -> bool:
        return bool(self.direction or self.bounces)

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Clip:
    background: str
    seconds: float
    plot: str
    tracks: tuple[Track, ...]


def make_clip(rng: Random, *, held_out: bool = False, plot: str = "") -> Clip:
    """Return a random clip; only a `held_out` clip may have held-out pairs of colour and shape."""
    background = rng.choice(list(COLOURS))
    plot = plot or rng.choices(PLOTS, _WEIGHTS)[0]
    seconds = rng.choice((4.0, 4.0, 5.0, 6.0, 8.0))
    return Clip(background, seconds, plot, _TRACKS[plot](rng, _Cast(rng, background, held_out)))


class _Cast:
    """Gives shapes, each of a kind and a colour of its own."""

    def __init__(self, rng: Random, background: str, held_out: bool) -> None:
        self._rng = rng
        self._held_out = held_out
        self._colours = [colour for colour in COLOURS if colour != background]
        self._shapes = list(SHAPES)

    def __call__(self, x: float, y: float, most: float = 70) -> Track:
        """Return a shape that stands still at a place."""
        pairs = [
            (colour, shape)
            for colour in self._colours
            for shape in self._shapes
            if self._held_out or (colour, shape) not in HELD_OUT
        ]
        rare = [pair for pair in pairs if pair in HELD_OUT]
        colour, shape = self._rng.choice(rare if rare and self._rng.random() < 0.35 else pairs)
        self._colours.remove(colour)
        self._shapes.remove(shape)
        return Track(colour, shape, ((0.0, x, y),), self._rng.uniform(40, most), angle_of(self._rng))

    def at_cell(self, cell: int) -> Track:
        track = self(0, 0)
        room = max(0.0, (CELL - track.size) / 2 - 2)
        x, y = (CELL * (at + 0.5) + self._rng.uniform(-room, room) for at in (cell % 3, cell // 3))
        return replace(track, points=((0.0, x, y),))

    def other_colour(self) -> str:
        return self._rng.choice(self._colours)


def _span(size: float) -> tuple[float, float]:
    """Return the least and the largest coordinate of the centre of a shape of a size."""
    return size / 2 + _EDGE, SIZE - size / 2 - _EDGE


def _lane(rng: Random, row: int, size: float) -> float:
    """Return where a shape in a row (or column) of cells has its centre, across it."""
    room = max(0.0, (CELL - size) / 2 - 2)
    return CELL * (row + 0.5) + rng.uniform(-room, room)


def _moved(rng: Random, track: Track, row: int, axis: int, sign: int, share: float) -> Track:
    """Have a shape move in a row (axis 0) or column (axis 1), over a share of the available distance."""
    least, most = _span(track.size)
    length = (most - least) * share
    first = rng.uniform(least, most - length)
    last = first + length
    if sign < 0:
        first, last = last, first
    across = _lane(rng, row, track.size)
    points = [(0.0, first, across), (1.0, last, across)]
    if axis:
        points = [(time, y, x) for time, x, y in points]
    direction = DIRECTIONS[(0, sign) if axis else (sign, 0)]
    return replace(track, points=tuple(points), direction=direction, speed=length)


def _still(rng: Random, cast: _Cast, row: int, axis: int, count: int) -> list[Track]:
    """Return shapes that stand still, away from a row or column."""
    cells = [cell for cell in range(9) if (cell % 3 if axis else cell // 3) != row]
    return [cast.at_cell(cell) for cell in rng.sample(cells, count)]


def _mixed(rng: Random, tracks: list[Track]) -> tuple[Track, ...]:
    rng.shuffle(tracks)
    return tuple(tracks)


def _move(rng: Random, cast: _Cast) -> tuple[Track, ...]:
    if rng.random() < 0.3:  # diagonally, alone
        track = cast(0, 0, 110)
        signs = rng.choice((-1, 1)), rng.choice((-1, 1))
        least, most = _span(track.size)
        length = (most - least) * rng.uniform(0.45, 1)
        starts = [rng.uniform(least, most - length) + (length if sign < 0 else 0) for sign in signs]
        ends = [start + sign * length for start, sign in zip(starts, signs, strict=True)]
        points = ((0.0, *starts), (1.0, *ends))
        return (replace(track, points=points, direction=DIRECTIONS[signs], speed=length),)  # type: ignore[arg-type]
    row, axis = rng.randrange(3), rng.randrange(2)
    track = _moved(rng, cast(0, 0), row, axis, rng.choice((-1, 1)), rng.uniform(0.35, 1))
    return _mixed(rng, [track, *_still(rng, cast, row, axis, rng.randint(0, 3))])


def _race(rng: Random, cast: _Cast) -> tuple[Track, ...]:
    axis, rows = rng.randrange(2), rng.sample(range(3), 3)
    share = rng.uniform(0.6, 1)
    sign = rng.choice((-1, 1))
    signs = (sign, sign if rng.random() < 0.6 else -sign)
    shares = (share, share * rng.uniform(0.25, 0.5))
    tracks = [_moved(rng, cast(0, 0), *found[:1], axis, *found[1:]) for found in zip(rows, signs, shares, strict=False)]
    if rng.random() < 0.4:
        cell = rng.randrange(3)
        tracks.append(cast.at_cell(cell * 3 + rows[2] if axis else rows[2] * 3 + cell))
    return _mixed(rng, tracks)


def _bounce(rng: Random, cast: _Cast) -> tuple[Track, ...]:
    """Have a shape reach the edges, so that each way between two of them takes more than 1.5 of the seven intervals of
    eight frames: no bounce falls between two frames.
    """
    bounces = rng.choice((1, 2, 3))
    row, axis = rng.randrange(3), rng.randrange(2)
    track = cast(0, 0)
    least, most = _span(track.size)
    across = _lane(rng, row, track.size)
    ways = bounces + 1
    shares = [rng.uniform(1, 1.15) for _ in range(ways)]
    first, last = (rng.uniform(0.75, 1.0) for _ in range(2))  # of the first and the last way
    shares[0] *= first
    shares[-1] *= last
    times = np.cumsum([0.0, *shares]) / sum(shares)
    ends = [least, most] if rng.random() < 0.5 else [most, least]
    places = [ends[index % 2] for index in range(ways + 1)]
    places[0] += (places[1] - places[0]) * (1 - first)
    places[-1] += (places[-2] - places[-1]) * (1 - last)
    points = [(float(time), place, across) for time, place in zip(times, places, strict=True)]
    if axis:
        points = [(time, y, x) for time, x, y in points]
    track = replace(track, points=tuple(points), bounces=bounces)
    return _mixed(rng, [track, *_still(rng, cast, row, axis, rng.randint(0, 2))])


def _standing(rng: Random, cast: _Cast, count: int) -> list[Track]:
    return [cast.at_cell(cell) for cell in rng.sample(range(9), count)]


def _moments(rng: Random, count: int) -> list[float]:
    """Return times of events, a fifth of the clip or more apart, none within its first or last seventh."""
    room = 0.7 - 0.2 * (count - 1)
    return [0.15 + 0.2 * index + at for index, at in enumerate(sorted(rng.uniform(0, room) for _ in range(count)))]


def _appear(rng: Random, cast: _Cast) -> tuple[Track, ...]:
    tracks = _standing(rng, cast, rng.randint(2, 4))
    there = rng.randint(0, 1) if len(tracks) < 4 else 1
    times = [0.0] * there + _moments(rng, len(tracks) - there)
    return _mixed(rng, [replace(track, begin=time) for track, time in zip(tracks, times, strict=True)])


def _disappear(rng: Random, cast: _Cast) -> tuple[Track, ...]:
    tracks = _standing(rng, cast, rng.randint(2, 4))
    gone = rng.randint(1, min(3, len(tracks) - 1))
    times = _moments(rng, gone) + [2.0] * (len(tracks) - gone)
    return _mixed(rng, [replace(track, end=time) for track, time in zip(tracks, times, strict=True)])


def _recolour(rng: Random, cast: _Cast) -> tuple[Track, ...]:
    first, *others = _standing(rng, cast, rng.randint(1, 3))
    return _mixed(rng, [replace(first, later=cast.other_colour(), change=rng.uniform(0.3, 0.7)), *others])


def _resize(rng: Random, cast: _Cast) -> tuple[Track, ...]:
    count = rng.randint(1, 3)
    cells = rng.sample(range(9), count)
    changing, *others = [cast.at_cell(cell) for cell in cells]
    small, large = rng.uniform(26, 36), rng.uniform(68, 78)
    if rng.random() < 0.5:
        small, large = large, small
    x, y = CELL * (cells[0] % 3 + 0.5), CELL * (cells[0] // 3 + 0.5)
    return _mixed(rng, [replace(changing, points=((0.0, x, y),), size=small, last_size=large), *others])


_TRACKS = {
    "move": _move,
    "race": _race,
    "bounce": _bounce,
    "appear": _appear,
    "disappear": _disappear,
    "recolour": _recolour,
    "resize": _resize,
}


def render(clip: Clip, times: Sequence[float], rng: Random) -> np.ndarray:
    """Return frames at times from 0 to 1, uint8 [times, 256, 256, 3]. Tints, gradient and noise come from `rng`."""
    tints = {colour: tint(colour, rng) for colour in COLOURS}
    overlay = gradient(rng.randrange(6), rng.randint(0, 12))[:, :, None]
    if strength := rng.randint(0, 3):
        overlay = overlay + noise(strength)[rng.randrange(SIZE) :, rng.randrange(SIZE) :][:SIZE, :SIZE]
    frames = []
    for time in times:
        image = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), tints[clip.background])
        draw = ImageDraw.Draw(image)
        for track in clip.tracks:
            if (item := track.item(time)) is not None:
                draw_item(draw, item, tints[item.colour], tints[clip.background])
        frames.append((np.asarray(image.reduce(SCALE), np.int16) + overlay).clip(0, 255).astype(np.uint8))
    return np.stack(frames)


def compressed(frames: np.ndarray, quality: int) -> np.ndarray:
    """Return frames as a codec of JPEG's kind leaves them: training sees none but these, and clean ones."""
    found = []
    for frame in frames:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=quality)
        found.append(np.asarray(Image.open(file)))
    return np.stack(found)
