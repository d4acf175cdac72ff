"""Questions about a clip in several wordings, each with its only correct answer."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from smolvideo.clips import DIRECTIONS, Clip, Track
from smolvision.images import CELL, PLACES
from smolvision.questions import article

_TIMES = ("does not bounce", "bounces once", "bounces twice", "bounces three times")
_COUNTS = ("no shapes", "one shape", "two shapes", "three shapes", "four shapes")
_ORDINALS = ("first", "second", "third", "fourth")
_MARGIN = 12
"""Pixels from the border of a cell within which no question asks for a place."""

_Asked = tuple[str, str] | None


class Turn(NamedTuple):
    """A question and its answer."""

    kind: str
    question: str
    answer: str


def ask(kind: str, clip: Clip, rng: Random) -> Turn | None:
    """Return a question of a kind; None if the clip has no such question."""
    asked = _ASKS[kind](clip, rng)
    return asked and Turn(kind, *asked)


def _mover(clip: Clip, rng: Random) -> _Asked:
    movers = [track for track in clip.tracks if track.moves]
    if len(movers) > 1:
        return None
    question = rng.choice(("Which shape moves?", "What moves in the video?", "Which shape is moving?"))
    return question, f"The {movers[0].name} moves." if movers else "No shape moves."


def _still(clip: Clip, rng: Random) -> _Asked:
    """Ask whether a shape moves, as often for one that does as for one that does not."""
    movers = [track for track in clip.tracks if track.moves]
    others = [track for track in clip.tracks if not track.moves]
    if not movers:
        return None
    track = rng.choice(movers if rng.random() < 0.5 or not others else others)
    name = rng.choice((track.shape, track.name))
    question = rng.choice((f"Does the {name} move?", f"Is the {name} moving?"))
    return question, f"Yes, the {name} moves." if track.moves else f"No, the {name} stands still."


def _direction(clip: Clip, rng: Random) -> _Asked:
    movers = [track for track in clip.tracks if track.direction]
    if not movers:
        return None
    track = rng.choice(movers)
    question = rng.choice(
        (
            f"In which direction does the {track.shape} move?",
            f"Where does the {track.shape} move?",
            f"Which way does the {track.shape} go?",
        )
    )
    return question, f"The {track.shape} moves {track.direction}."


def _faster(clip: Clip, rng: Random) -> _Asked:
    if clip.plot != "race":
        return None
    slow, fast = sorted((track for track in clip.tracks if track.moves), key=lambda track: track.speed)
    which = rng.choice(("faster", "slower"))
    one, other = (fast, slow) if which == "faster" else (slow, fast)
    first, second = rng.sample((one, other), 2)
    question = rng.choice(
        (f"Which shape moves {which}?", f"Which shape is {which}?",
         f"Which is {which}, the {first.shape} or the {second.shape}?")
    )  # fmt: skip
    return question, f"The {one.name} is {which} than the {other.name}."


def _bounces(clip: Clip, rng: Random) -> _Asked:
    movers = [track for track in clip.tracks if track.moves]
    if len(movers) != 1:
        return None
    (track,) = movers
    question = rng.choice(
        (f"How many times does the {track.shape} bounce?", f"How often does the {track.shape} bounce?")
    )
    return question, f"The {track.shape} {_TIMES[track.bounces]}."


def _ways(clip: Clip, rng: Random) -> _Asked:
    """Ask for what a shape that bounces does, one way after the other."""
    track = next((track for track in clip.tracks if track.bounces), None)
    if track is None:
        return None
    ways = [
        DIRECTIONS[_sign(to_x - from_x), _sign(to_y - from_y)]
        for (_, from_x, from_y), (_, to_x, to_y) in pairwise(track.points)
    ]
    question = rng.choice(
        (f"Which ways does the {track.shape} go?", f"Where does the {track.shape} go first, and then?")
    )
    return question, f"The {track.shape} goes {_joined(ways)}."


def _appears(clip: Clip, rng: Random) -> _Asked:
    coming = _coming(clip)
    if len(coming) < 2:
        return None
    place = rng.randrange(len(coming))
    ordinal = "last" if place == len(coming) - 1 and rng.random() < 0.7 else _ORDINALS[place]
    question = rng.choice((f"Which shape appears {ordinal}?", f"Which shape comes {ordinal}?"))
    return question, f"The {coming[place].name} appears {ordinal}."


def _order(clip: Clip, rng: Random) -> _Asked:
    coming = _coming(clip)
    if len(coming) < 2:
        return None
    first, *others = (f"the {track.name}" for track in coming)
    question = rng.choice(("In which order do the shapes appear?", "List the shapes in the order of their appearance."))
    return question, f"First {first}, then {', then '.join(others)}."


def _disappears(clip: Clip, rng: Random) -> _Asked:
    going = sorted((track for track in clip.tracks if track.end <= 1), key=lambda track: track.end)
    if not going:
        return None
    if len(going) == 1 and rng.random() < 0.5:
        question = rng.choice(("Which shape disappears?", "Which shape vanishes?"))
        return question, f"The {going[0].name} disappears."
    if len(going) > 1 and rng.random() < 0.5:
        ordinal = rng.choice(("first", "last"))
        question = rng.choice((f"Which shape disappears {ordinal}?", f"Which shape vanishes {ordinal}?"))
        return question, f"The {going[0 if ordinal == 'first' else -1].name} disappears {ordinal}."
    question = rng.choice(("How many shapes disappear?", "How many shapes vanish?"))
    return question, f"{_COUNTS[len(going)].capitalize()} {'disappears' if len(going) == 1 else 'disappear'}."


def _colour(clip: Clip, rng: Random) -> _Asked:
    changing = next((track for track in clip.tracks if track.later), None)
    if changing is not None and rng.random() < 0.7:
        question = rng.choice(
            (
                f"Which colour does the {changing.shape} turn?",
                f"How does the colour of the {changing.shape} change?",
                "Which shape changes its colour?",
            )
        )
        return question, f"The {changing.shape} turns from {changing.colour} to {changing.later}."
    track = rng.choice(clip.tracks)
    if track.later:
        when = rng.choice(("start", "end"))
        colour = track.colour if when == "start" else track.later
        return f"What colour is the {track.shape} at the {when}?", f"The {track.shape} is {colour} at the {when}."
    question = rng.choice((f"What colour is the {track.shape}?", f"Which colour does the {track.shape} have?"))
    return question, f"The {track.shape} is {track.colour}."


def _size(clip: Clip, rng: Random) -> _Asked:
    changing = next((track for track in clip.tracks if track.last_size), None)
    if changing is None:
        return None
    does = "grows" if changing.last_size > changing.size else "shrinks"
    if rng.random() < 0.5:
        question = rng.choice(("Which shape changes its size?", f"Which shape {does}?"))
        return question, f"The {changing.name} {does}."
    question = rng.choice(
        (f"Does the {changing.shape} grow or shrink?", f"How does the size of the {changing.shape} change?")
    )
    return question, f"The {changing.shape} {does}."


def _place(clip: Clip, rng: Random) -> _Asked:
    """Ask where a shape is at the start or the end, if it is well within a cell then."""
    found = []
    for track in clip.tracks:
        for when, time in (("start", 0.0), ("end", 1.0)):
            item = track.item(time)
            if item and all(_MARGIN < at % CELL < CELL - _MARGIN for at in (item.x, item.y)):
                found.append((track, when, PLACES[int(item.x // CELL) + 3 * int(item.y // CELL)]))
    if not found:
        return None
    moving = [one for one in found if one[0].moves]
    track, when, place = rng.choice(moving or found)
    question = rng.choice((f"Where is the {track.shape} at the {when}?", f"Where does the {track.shape} {when}?"))
    return question, f"The {track.shape} {when}s {place}."


def _count(clip: Clip, rng: Random) -> _Asked:
    when = rng.choice(("start", "end"))
    number = sum(track.item(0.0 if when == "start" else 1.0) is not None for track in clip.tracks)
    question = rng.choice((f"How many shapes are there at the {when}?", f"How many shapes do you see at the {when}?"))
    return question, f"There {'is' if number == 1 else 'are'} {_COUNTS[number]} at the {when}."


def _background(clip: Clip, rng: Random) -> _Asked:
    question = rng.choice(("What colour is the background?", "Which colour does the background have?"))
    return question, f"The background is {clip.background}."


def _describe(clip: Clip, rng: Random) -> _Asked:
    question = rng.choice(("What happens in the video?", "Describe the video.", "What happens?"))
    said = _STORIES[clip.plot](clip)
    return question, f"{said[0].upper()}{said[1:]} on {article(clip.background)} background."


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _coming(clip: Clip) -> list[Track]:
    """Return the shapes that appear during the clip, in order."""
    return sorted((track for track in clip.tracks if track.begin), key=lambda track: track.begin)


def _one(track: Track) -> str:
    return f"{article(track.colour)} {track.shape}"


def _joined(names: Sequence[str], word: str = " and ") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}{word}{names[-1]}"


def _moving_story(clip: Clip) -> str:
    (mover,) = (track for track in clip.tracks if track.moves)
    return f"{_one(mover)} moves {mover.direction}" if mover.direction else f"{_one(mover)} {_TIMES[mover.bounces]}"


def _race_story(clip: Clip) -> str:
    slow, fast = sorted((track for track in clip.tracks if track.moves), key=lambda track: track.speed)
    return f"{_one(fast)} moves {fast.direction} faster than {_one(slow)} moves {slow.direction}"


def _appear_story(clip: Clip) -> str:
    coming = [_one(track) for track in _coming(clip)]
    return f"{_joined(coming, ' and then ')} {'appears' if len(coming) == 1 else 'appear'}"


def _disappear_story(clip: Clip) -> str:
    going = sorted((track for track in clip.tracks if track.end <= 1), key=lambda track: track.end)
    return (
        f"{_joined([_one(track) for track in going], ' and then ')} {'disappears' if len(going) == 1 else 'disappear'}"
    )


def _recolour_story(clip: Clip) -> str:
    (track,) = (track for track in clip.tracks if track.later)
    return f"{_one(track)} turns {track.later}"


def _resize_story(clip: Clip) -> str:
    (track,) = (track for track in clip.tracks if track.last_size)
    return f"{_one(track)} {'grows' if track.last_size > track.size else 'shrinks'}"


_STORIES: dict[str, Callable[[Clip], str]] = {
    "move": _moving_story,
    "race": _race_story,
    "bounce": _moving_story,
    "appear": _appear_story,
    "disappear": _disappear_story,
    "recolour": _recolour_story,
    "resize": _resize_story,
}
_ASKS: dict[str, Callable[[Clip, Random], _Asked]] = {
    "mover": _mover,
    "still": _still,
    "direction": _direction,
    "faster": _faster,
    "bounces": _bounces,
    "appears": _appears,
    "order": _order,
    "disappears": _disappears,
    "colour": _colour,
    "size": _size,
    "place": _place,
    "count": _count,
    "background": _background,
    "describe": _describe,
    "ways": _ways,
}
LESSONS = ("ways",)
"""Kinds of questions that are trained, but not evaluated: they teach what others need."""
KINDS = tuple(kind for kind in _ASKS if kind not in LESSONS)
