"""Pictures of shapes, drawn with torch on any device: smolvision's shapes without tints, gradients and noise."""

import torch
from torch.nn.functional import grid_sample

from smolvision.images import COLOURS, OUTLINES, SHAPES, SIZE

PIXELS = 64
"""Height and width of pictures."""
FRAMES = 16
"""Pictures of a clip."""
RING = 0.56
"""A ring's inner radius, in units of its outer radius."""

_EXTENT = 1.3
"""Half the width of a shape's map of distances, in units of its radius."""
_FINE = 128
"""Width of a map of distances."""


def frames(clips: torch.Tensor) -> torch.Tensor:
    """Return the rows of all pictures of clips, [clips * FRAMES, ...], in even motion from the first to the last."""
    share = torch.linspace(0, 1, FRAMES, device=clips.device)[None, :, None, None]
    return torch.lerp(clips[:, :1], clips[:, 1:], share).flatten(0, 1)


class Renderer:
    """Draws pictures from tables of shapes, as `prompts.table` makes them."""

    def __init__(self, device: torch.device) -> None:
        self._distances = torch.stack([_distances(shape) for shape in SHAPES])[:, None].to(device)
        self._colours = torch.tensor(list(COLOURS.values()), device=device) / 127.5 - 1
        middles = (torch.arange(PIXELS, device=device) + 0.5) * SIZE / PIXELS
        self._grid = torch.stack(torch.meshgrid(middles, middles, indexing="xy"), -1)

    @torch.no_grad()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return pictures of [pictures, rows, 6] as float32 [pictures, 3, 64, 64] between -1 and 1."""
        image = self._colours[rows[:, 0, 1].long()][:, :, None, None].expand(-1, -1, PIXELS, PIXELS)
        for row in rows[:, 1:].unbind(1):
            shape, colour, x, y, size, angle = row.unbind(1)
            radius = (size / 2).clamp(min=1e-3)[:, None, None]
            turn = torch.deg2rad(angle)[:, None, None]
            right, down = (self._grid - torch.stack([x, y], -1)[:, None, None]).unbind(-1)
            u = (turn.cos() * right + turn.sin() * down) / radius
            v = (turn.cos() * down - turn.sin() * right) / radius
            maps = self._distances[shape.long()]
            places = torch.stack([u, v], -1) / _EXTENT
            distance = grid_sample(maps, places, align_corners=False, padding_mode="border")
            cover = (0.5 - distance * radius[:, None] * (PIXELS / SIZE)).clamp(0, 1) * (size > 0)[:, None, None, None]
            image = image + cover * (self._colours[colour.long()][:, :, None, None] - image)
        return image


def _distances(shape: str) -> torch.Tensor:
    """Return signed distances to a shape's edge in units of its radius, [128, 128], negative inside."""
    axis = ((torch.arange(_FINE) + 0.5) / _FINE * 2 - 1) * _EXTENT
    v, u = torch.meshgrid(axis, axis, indexing="ij")
    if shape in ("circle", "ring"):
        around = torch.hypot(u, v)
        return around - 1 if shape == "circle" else torch.maximum(around - 1, RING - around)
    corners = torch.tensor(OUTLINES[shape])
    nearest, inside = torch.full_like(u, torch.inf), torch.zeros_like(u, dtype=torch.bool)
    for (x0, y0), (x1, y1) in zip(corners.tolist(), corners.roll(-1, 0).tolist(), strict=True):
        along = (((u - x0) * (x1 - x0) + (v - y0) * (y1 - y0)) / ((x1 - x0) ** 2 + (y1 - y0) ** 2)).clamp(0, 1)
        nearest = torch.minimum(nearest, torch.hypot(u - x0 - along * (x1 - x0), v - y0 - along * (y1 - y0)))
        crosses = ((y0 > v) != (y1 > v)) & (u < (x1 - x0) * (v - y0) / (y1 - y0 + 1e-12) + x0)
        inside ^= crosses
    return torch.where(inside, -nearest, nearest)
