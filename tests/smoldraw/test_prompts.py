"""smoldraw's prompts say what their pictures show, and the verdict on a picture is that of its prompt."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from smoldraw.judge import Found, Seen, is_right, is_right_clip
from smoldraw.prompts import KINDS, MOTIONS, Drawing, clip_table, make_clip, make_drawing, table
from smoldraw.render import FRAMES, PIXELS, Renderer, frames
from smolvision.images import COLOURS, SIZE, Item, Scene, render
from smolvision.questions import COUNTS, plural

DRAWINGS = [make_drawing(Random(seed), held_out=True) for seed in range(300)]
CLIPS = [make_clip(Random(seed), held_out=True) for seed in range(100)]


def seen(scene: Scene) -> Seen:
    return Seen(scene.background, tuple(Found(it.colour, it.shape, it.x, it.y, it.size) for it in scene.items))


def changed(scene: Scene, **fields: object) -> Seen:
    """Return what is seen if the first shape is another."""
    first, *others = seen(scene).items
    return Seen(scene.background, (first._replace(**fields), *others))


def test_prompts_name_all_shapes_and_the_background() -> None:
    assert {drawing.kind for drawing in DRAWINGS} == set(KINDS)
    assert {motion for clip in CLIPS for motion in clip.motions} == set(MOTIONS)
    for drawing in (*DRAWINGS, *CLIPS):
        prompt = drawing.prompt.replace("gray", "grey").rstrip(".")
        colours = Counter(item.colour for item in drawing.scene.items) + Counter([drawing.scene.background])
        for pair, number in Counter((item.colour, item.shape) for item in drawing.scene.items).items():
            colour, shape = pair
            several = (f"{COUNTS[number]} {colour} {plural(shape)}", f"{number} {colour} {plural(shape)}")
            assert f"{colour} {shape}" in prompt if number == 1 else any(said in prompt for said in several)
        assert set(colours) - {"white"} <= {word.strip(",") for word in prompt.split()}


def test_training_never_has_the_shapes_of_a_held_out_prompt_on_its_background() -> None:
    def combination(drawing: Drawing) -> object:
        return drawing.scene.background, frozenset((item.colour, item.shape) for item in drawing.scene.items)

    trained = {combination(make(Random(seed))) for seed in range(1500) for make in (make_drawing, make_clip)}
    assert trained.isdisjoint({combination(drawing) for drawing in (*DRAWINGS, *CLIPS)})
    singles = {pair for _, (pair, *others) in trained if not others}
    assert {(item.colour, item.shape) for drawing in DRAWINGS for item in drawing.scene.items} <= singles


def test_pictures_are_those_of_smolvision() -> None:
    scenes = [drawing.scene for drawing in DRAWINGS[:12]]
    drawn = Renderer(torch.device("cpu"))(torch.from_numpy(table(scenes)))
    colours = np.array(list(COLOURS.values()))
    for index, (scene, picture) in enumerate(zip(scenes, drawn, strict=True)):
        ours = ((picture + 1) * 127.5).permute(1, 2, 0).numpy()
        theirs = render(scene, Random(index)).reshape(PIXELS, 4, PIXELS, 4, 3).mean((1, 3))
        nearest = [np.abs(pixels[..., None, :] - colours).sum(-1).argmin(-1) for pixels in (ours, theirs)]
        assert (nearest[0] == nearest[1]).mean() > 0.97


def test_clips_move_evenly_from_the_first_picture_to_the_last() -> None:
    clips = CLIPS[:20]
    rows = frames(torch.from_numpy(clip_table(clips))).view(len(clips), FRAMES, -1, 6)
    ends = [
        torch.from_numpy(table(scenes)) for scenes in zip(*((clip.scene, clip.last) for clip in clips), strict=True)
    ]
    assert torch.equal(rows[:, 0], ends[0]) and torch.equal(rows[:, -1], ends[1])
    assert torch.allclose(rows[:, 1] - rows[:, 0], (ends[1] - ends[0]) / (FRAMES - 1), atol=1e-3)


@pytest.mark.parametrize("drawing", DRAWINGS[:60], ids=lambda drawing: drawing.prompt)
def test_a_picture_is_right_if_it_shows_what_the_prompt_says(drawing: Drawing) -> None:
    scene = drawing.scene
    other = next(colour for colour in COLOURS if colour not in (scene.items[0].colour, scene.background))
    assert is_right(drawing, seen(scene))
    assert not is_right(drawing, changed(scene, colour=other))
    assert not is_right(drawing, changed(scene, shape="ring" if scene.items[0].shape != "ring" else "star"))
    assert not is_right(drawing, seen(replace(scene, items=scene.items[1:])))
    assert not is_right(drawing, seen(replace(scene, items=(*scene.items, scene.items[0]))))
    assert not is_right(drawing, seen(replace(scene, background=other)))


def test_size_place_and_relation_are_judged() -> None:
    kinds = set()
    for drawing in DRAWINGS:
        first = drawing.scene.items[0]
        if drawing.size:
            kinds.add("size")
            assert not is_right(drawing, changed(drawing.scene, size=110.0))
        if drawing.places:
            kinds.add("place")
            assert not is_right(drawing, changed(drawing.scene, x=(first.x + SIZE / 3) % SIZE))
        if drawing.relation:
            kinds.add("relation")
            turned = [replace(item, x=SIZE - item.x, y=SIZE - item.y) for item in drawing.scene.items]
            assert not is_right(drawing, seen(replace(drawing.scene, items=tuple(turned))))
    assert kinds == {"size", "place", "relation"}


def test_a_clip_is_right_if_its_shapes_move_as_the_prompt_says() -> None:
    for clip in CLIPS:
        moving = [_between(clip, step / (FRAMES - 1)) for step in range(FRAMES)]
        assert is_right_clip(clip, moving)
        assert is_right_clip(clip, [Seen("none", ()), *moving[1:]]), "one bad picture is forgiven"
        assert not is_right_clip(clip, moving[:1] * FRAMES), "it stands still"
        assert not is_right_clip(clip, moving[::-1]), "it moves the other way"
        assert not is_right_clip(clip, [*moving[:8], *[Seen("none", ())] * 2, *moving[10:]])


def _between(clip: Drawing, share: float) -> Seen:
    assert clip.last

    def moved(begin: Item, end: Item) -> Found:
        parts = ((getattr(begin, name), getattr(end, name)) for name in ("x", "y", "size"))
        return Found(begin.colour, begin.shape, *(first + share * (last - first) for first, last in parts))

    return Seen(clip.scene.background, tuple(map(moved, clip.scene.items, clip.last.items)))
