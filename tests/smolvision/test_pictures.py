"""smolvision's pictures show what their scenes say, and its answers are right by that."""

import json
import re
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from smolvision.conversations import held_out_chats, make_chat
from smolvision.images import (
    COLOURS,
    GRID,
    HELD_OUT,
    LABELS,
    PATCH,
    SHAPES,
    SIZE,
    Item,
    Scene,
    make_scene,
    patch_labels,
    render,
)
from smolvision.questions import COUNTS, KINDS, ask

EXAMPLE = Path(__file__).resolve().parents[2] / "smolvision/example.png"
SCENES = 300


def scenes(held_out: bool = True) -> list[tuple[Random, Scene]]:
    return [(rng, make_scene(rng, held_out=held_out)) for rng in map(Random, range(SCENES))]


def named(pixels: np.ndarray) -> str:
    """The colour that is nearest to the mean of some pixels."""
    mean = pixels.reshape(-1, 3).mean(0)
    return min(COLOURS, key=lambda colour: float(np.abs(mean - COLOURS[colour]).sum()))


def test_pictures_are_the_same_for_the_same_seed_and_differ_for_others() -> None:
    for seed in range(20):
        rng = Random(seed)
        scene = make_scene(rng)
        again = Random(seed)
        assert make_scene(again) == scene
        picture = render(scene, rng)
        assert picture.shape == (SIZE, SIZE, 3) and picture.dtype == np.uint8
        assert np.array_equal(picture, render(scene, again))
        assert not np.array_equal(picture, render(scene, Random(seed + 1)))


def test_pictures_show_what_their_scenes_say() -> None:
    for rng, scene in scenes():
        picture = render(scene, rng)
        for item in scene.items:
            assert item.size / 2 <= min(item.x, item.y, SIZE - item.x, SIZE - item.y), "within the picture"
            if item.shape == "ring":
                assert named(at(picture, item.x, item.y)) == scene.background
            at_x = item.x + (item.size * 0.39 if item.shape == "ring" else 0)
            assert named(at(picture, at_x, item.y)) == item.colour
        for first, second in ((a, b) for a in scene.items for b in scene.items if a is not b):
            assert max(abs(first.x - second.x), abs(first.y - second.y)) > (first.size + second.size) / 2, "apart"


def at(picture: np.ndarray, x: float, y: float) -> np.ndarray:
    return picture[round(y) - 2 : round(y) + 3, round(x) - 2 : round(x) + 3]


def test_the_example_is_of_its_seed() -> None:
    """But for what another version of the font's renderer does to the edges of its word."""
    shown = np.asarray(Image.open(EXAMPLE).convert("RGB"), int)
    assert np.abs(shown - render(make_scene(Random(18699), held_out=True), Random(18699))).mean() < 1


def test_text_is_drawn_where_the_scene_has_it() -> None:
    written = [(rng, scene) for rng, scene in scenes() if scene.writing]
    assert len(written) > SCENES / 4
    table = np.array(list(COLOURS.values()))
    for rng, scene in written:
        assert scene.writing is not None
        boxes = [(item.x, item.y, item.size, item.size) for item in scene.items]
        box = (scene.writing.x, scene.writing.y, scene.writing.width, scene.writing.height)
        assert min(box[0] - box[2] / 2, box[1] - box[3] / 2, SIZE - box[0] - box[2] / 2, SIZE - box[1] - box[3] / 2) > 0
        assert all(abs(item.y - box[1]) > (item.size + box[3]) / 2 for item in scene.items)
        nearest = np.abs(render(scene, rng)[:, :, None].astype(int) - table).sum(-1).argmin(-1)
        inside = within(box, 0)
        assert (nearest[inside] == list(COLOURS).index(scene.writing.colour)).mean() > 0.08
        outside = ~np.logical_or.reduce([within(other, 4) for other in (*boxes, box)])
        assert (nearest[outside] == list(COLOURS).index(scene.background)).mean() > 0.98


def within(box: tuple[float, float, float, float], margin: float) -> np.ndarray:
    y, x = np.mgrid[:SIZE, :SIZE]
    return (abs(x - box[0]) < box[2] / 2 + margin) & (abs(y - box[1]) < box[3] / 2 + margin)


def test_patch_labels_name_the_patch_at_a_shapes_centre() -> None:
    for _, scene in scenes():
        labels = dict(zip(LABELS, patch_labels(scene).reshape(len(LABELS), GRID, GRID), strict=True))
        assert all(labels[name].max() < values for name, values in LABELS.items())
        assert (labels["centre"] > 0).sum() == len(scene.items)
        for item in scene.items:
            patch = int(item.y) // PATCH, int(item.x) // PATCH
            assert labels["centre"][patch] == labels["shape"][patch]
            assert list(COLOURS)[labels["colour"][patch] - 1] == item.colour
        assert (labels["text"].max() > 0) == (scene.writing is not None)


def test_training_neither_shows_nor_names_what_is_held_out() -> None:
    names = {f"{colour} {shape}" for colour, shape in HELD_OUT}
    for seed in range(SCENES):
        chat = make_chat(seed, 6)
        assert not {(item.colour, item.shape) for scene in chat.scenes for item in scene.items} & HELD_OUT
        assert not [name for name in names if name in json.dumps(chat.messages)]
    held_out = [(item.colour, item.shape) in HELD_OUT for _, scene in scenes() for item in scene.items]
    assert 0.2 < np.mean(held_out) < 0.6


def check_count(scene: Scene, question: str, answer: str) -> None:
    number, *colour, things = answer.removesuffix(".").split()[2:]
    assert things in question or number == "one"
    thing = next(name for name in ("shape", *SHAPES) if things in (name, f"{name}s", f"{name}es"))
    counted = [item for item in scene.items if thing in ("shape", item.shape) and colour in ([], [item.colour])]
    assert len(counted) == COUNTS.index(number)


def check_exists(scene: Scene, question: str, answer: str) -> None:
    found = re.search(r"(\w+) (\w+)\.$", answer)
    assert found and f"{found[1]} {found[2]}" in question
    assert answer.startswith("Yes") == (found.groups() in {(item.colour, item.shape) for item in scene.items})


def check_place(scene: Scene, question: str, answer: str) -> None:
    item = only(scene, re.match(r"The (?:(\w+) )?(\w+) is", answer))
    across = "left" if item.x < SIZE / 3 else "right" if item.x > SIZE * 2 / 3 else ""
    down = "top" if item.y < SIZE / 3 else "bottom" if item.y > SIZE * 2 / 3 else ""
    place = f"{down} {across}".strip() or "centre"
    assert re.search(rf"(at|on|in) the {place}\.$", answer)


def check_relation(scene: Scene, question: str, answer: str) -> None:
    found = re.fullmatch(r"An? (\w+) (\w+) is (left of|right of|above|below) the (?:(\w+) )?(\w+)\.", answer)
    assert found
    item = only(scene, re.match(r"(?:(\w+) )?(\w+)$", f"{found[4] or ''} {found[5]}".strip()))
    side = {
        "left of": lambda o: o.x < item.x,
        "right of": lambda o: o.x > item.x,
        "above": lambda o: o.y < item.y,
        "below": lambda o: o.y > item.y,
    }
    there = [other for other in scene.items if other is not item and side[found[3]](other)]
    assert [(other.colour, other.shape) for other in there] == [(found[1], found[2])]


def check_describe(scene: Scene, question: str, answer: str) -> None:
    shapes, _, background = answer.rpartition(" on ")
    assert background.rstrip(".").split()[1:] == [scene.background, "background"]
    found = re.findall(r"\b[Aa]n? (\w+) (\w+)", shapes)
    assert found == [(item.colour, item.shape) for item in sorted(scene.items, key=lambda item: item.x)]
    assert (scene.writing is not None) == ("the word" in shapes.lower() or "the number" in shapes.lower())


def check_colour(scene: Scene, question: str, answer: str) -> None:
    found = re.fullmatch(r"The (\w+) is (\w+)\.", answer)
    assert found and found[1] in question
    if found[1] in ("word", "number"):
        assert scene.writing and scene.writing.colour == found[2]
    else:
        assert [item.colour for item in scene.items if item.shape == found[1]] == [found[2]]


def check_shape(scene: Scene, question: str, answer: str) -> None:
    found = re.fullmatch(r"(?:It|The (\w+) shape) is a (\w+)\.", answer)
    assert found and [item.shape for item in scene.items if found[1] in (None, item.colour)] == [found[2]]


def check_read(scene: Scene, question: str, answer: str) -> None:
    assert scene.writing and answer in (
        f"The word is {scene.writing.content}.",
        f"The number is {scene.writing.content}.",
    )


def check_background(scene: Scene, question: str, answer: str) -> None:
    assert answer == f"The background is {scene.background}."


def only(scene: Scene, found: re.Match[str] | None) -> Item:
    assert found
    (item,) = [item for item in scene.items if item.shape == found[2] and found[1] in (None, item.colour)]
    return item


CHECKS: dict[str, Any] = {
    "colour": check_colour,
    "shape": check_shape,
    "count": check_count,
    "exists": check_exists,
    "place": check_place,
    "relation": check_relation,
    "number": check_read,
    "word": check_read,
    "background": check_background,
    "describe": check_describe,
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right(kind: str) -> None:
    asked = [(scene, turn) for rng, scene in scenes() if (turn := ask(kind, scene, rng, held_out=True))]
    assert len(asked) > 30 and len({turn.question for _, turn in asked}) > 1
    for scene, turn in asked:
        CHECKS[kind](scene, turn.question, turn.answer)


def test_half_of_what_is_asked_for_is_there() -> None:
    answers = [turn.answer for rng, scene in scenes() if (turn := ask("exists", scene, rng, held_out=True))]
    assert 0.4 < np.mean([answer.startswith("Yes") for answer in answers]) < 0.6


@pytest.mark.parametrize("kind", ["two images", "which image"])
def test_questions_about_two_images_say_which(kind: str) -> None:
    for chat, answer in islice(held_out_chats(kind), 50):
        text = next(part["text"] for part in chat.messages[0]["content"] if part["type"] == "text")
        said = answer if kind == "which image" else text
        assert len(chat.scenes) == 2 and len(re.findall("first image|second image", said)) == 1
