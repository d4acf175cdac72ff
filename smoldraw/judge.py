"""A classifier that finds the shapes of a picture, and whether they are what a prompt says.

The network looks at a picture in 16x16 cells. For each, it tells how near a shape's centre is, the shape, its colour,
its offset from the cell's middle and its diameter; and for the whole picture, the background's colour.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from smoldraw.prompts import BIG, SMALL, Drawing
from smoldraw.render import FRAMES
from smolvision.images import CELL, COLOURS, SHAPES, SIZE

CELLS = 16
STEP = SIZE / CELLS

_HEADS = {"near": 1, "shape": len(SHAPES), "colour": len(COLOURS), "box": 3}


class Found(NamedTuple):
    """A shape that the judge sees; centre and diameter are in smolvision's pixels."""

    colour: str
    shape: str
    x: float
    y: float
    size: float


class Seen(NamedTuple):
    """The judge's findings about a picture."""

    background: str
    items: tuple[Found, ...]


class Judge(nn.Module):
    """The network."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(_convolution(3, 32, 1), _convolution(32, 48, 2), _convolution(48, width, 2))
        self.blocks = nn.ModuleList(
            nn.Sequential(_convolution(width, width, 1, dilation), _convolution(width, width, 1))
            for dilation in (1, 2, 3, 1)
        )
        self.heads = nn.Conv2d(width, sum(_HEADS.values()), 1)
        self.background = nn.Linear(width, len(COLOURS))

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return logits and boxes, each [pictures, channels, 16, 16], and the background's logits."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        parts = self.heads(hidden).float().split(list(_HEADS.values()), 1)
        return {**dict(zip(_HEADS, parts, strict=True)), "background": self.background(hidden.mean((2, 3))).float()}

    def loss(self, images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss for pictures of the shapes in `rows`, as `prompts.table` makes them."""
        said = self(images)
        shape, colour, x, y, size, _ = rows[:, 1:].unbind(2)
        there = size > 0
        middles = (torch.arange(CELLS, device=rows.device) + 0.5) * STEP
        right = (x[:, :, None, None] - middles) / STEP
        down = (y[:, :, None, None] - middles[:, None]) / STEP
        apart = (right**2 + down**2).masked_fill(~there[:, :, None, None], torch.inf)
        nearest, which = apart.min(1)
        target = torch.exp(-nearest / 1.2)
        loss = functional.binary_cross_entropy_with_logits(said["near"][:, 0], target)
        loss = loss + functional.cross_entropy(said["background"], rows[:, 0, 1].long())
        weight = (nearest < 2.5).float()
        weight = weight / weight.sum().clamp(min=1)
        for name, values in (("shape", shape), ("colour", colour)):
            labels = values.gather(1, which.flatten(1)).view_as(which).long()
            loss = loss + (functional.cross_entropy(said[name], labels, reduction="none") * weight).sum()
        sizes = (size / STEP)[:, :, None, None]
        boxes = torch.stack([part.expand_as(apart) for part in (right, down, sizes)], 2)
        box = boxes.gather(1, which[:, None, None].expand(-1, 1, 3, -1, -1))[:, 0]
        return loss + 0.3 * ((said["box"] - box).abs().mean(1) * weight).sum()

    @torch.inference_mode()
    def see(self, images: torch.Tensor) -> list[Seen]:
        """Return what is in pictures: float [pictures, 3, 64, 64] between -1 and 1."""
        said = {name: values.cpu() for name, values in self(images).items()}
        near = said["near"][:, 0].sigmoid()
        peaks = (near > 0.4) & (near == functional.max_pool2d(near[:, None], 3, 1, 1)[:, 0])
        shapes, colours = said["shape"].argmax(1), said["colour"].argmax(1)
        backgrounds = said["background"].argmax(1)
        seen = []
        for index, peak in enumerate(peaks):
            items = []
            for row, column in peak.nonzero().tolist():
                right, down, size = said["box"][index, :, row, column].tolist()
                items.append(
                    Found(
                        _COLOURS[colours[index, row, column]],
                        SHAPES[shapes[index, row, column]],
                        *((column + 0.5 + right) * STEP, (row + 0.5 + down) * STEP, size * STEP),
                    )
                )
            seen.append(Seen(_COLOURS[backgrounds[index]], tuple(items)))
        return seen


def is_right(drawing: Drawing, seen: Seen) -> bool:
    """Return whether a picture shows all that its prompt says, and nothing else."""
    wanted = drawing.scene.items
    if seen.background != drawing.scene.background or _kinds(seen.items) != _kinds(wanted):
        return False
    found = {(item.colour, item.shape): item for item in seen.items}
    first, *others = (found[item.colour, item.shape] for item in wanted)
    if drawing.size and not (first.size > BIG if drawing.size == "big" else first.size < SMALL):
        return False
    if drawing.places:
        cells = {(item.colour, item.shape, int(item.y // CELL) * 3 + int(item.x // CELL)) for item in seen.items}
        return cells == {(item.colour, item.shape, item.cell) for item in wanted}
    if drawing.relation:
        axis, sign = drawing.relation
        across, along = (first.x - others[0].x, first.y - others[0].y)[:: -1 if axis == 0 else 1]
        return along * sign > abs(across)
    return True


def is_right_clip(drawing: Drawing, seen: Sequence[Seen]) -> bool:
    """Return whether a clip shows what its prompt says: the shapes in all pictures but one, and their motions."""
    wanted = drawing.scene.items
    right = [it for it in seen if it.background == drawing.scene.background and _kinds(it.items) == _kinds(wanted)]
    if len(right) < FRAMES - 1:
        return False
    begin, end = ({(item.colour, item.shape): item for item in picture.items} for picture in (right[0], right[-1]))
    return all(
        _moved(begin[item.colour, item.shape], end[item.colour, item.shape]) == motion
        for item, motion in zip(wanted, drawing.motions, strict=True)
    )


def _moved(begin: Found, end: Found) -> str:
    """Return the motion, a key of MOTIONS, or nothing."""
    if max(begin.size, end.size) > 1.6 * min(begin.size, end.size):
        return "grow" if end.size > begin.size else "shrink"
    across, down = end.x - begin.x, end.y - begin.y
    if max(abs(across), abs(down)) < STEP:
        return ""
    if abs(across) > abs(down):
        return "right" if across > 0 else "left"
    return "down" if down > 0 else "up"


def _kinds(items: Sequence[Found]) -> Counter[tuple[str, str]]:
    return Counter((item.colour, item.shape) for item in items)


def _convolution(inputs: int, outputs: int, stride: int, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False), nn.BatchNorm2d(outputs), nn.GELU()
    )


_COLOURS = tuple(COLOURS)
