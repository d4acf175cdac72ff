"""Times of spoken tokens, derived from their attention to the audio by dynamic time warping as in OpenAI's
`timing.py`."""

import numpy as np
import torch

from engine.checkpoints.whisper import FRAMES_PER_POSITION

_POSITION_SECONDS = 0.02


def spoken_times(attention: torch.Tensor, frames: int, median_width: int, first: int) -> tuple[float, ...]:
    """Return the second at which each text token begins to be spoken, and the last one ends.

    `attention` is that of some heads to the positions of a window, [heads, tokens, positions], of which `frames` are
    speech. The text lies between the tokens <|notimestamps|>, which is number `first`, and <|endoftext|>, the last.
    """
    weights = attention[:, :, : max(1, frames // FRAMES_PER_POSITION)]
    weights = weights / weights.sum(-1, keepdim=True)
    weights = (weights - weights.mean(-2, keepdim=True)) / weights.std(-2, keepdim=True, unbiased=False).clamp(1e-9)
    matrix = _smoothed(weights, median_width).mean(0)[first:-1]
    return tuple(position * _POSITION_SECONDS for position in first_positions(-matrix.double().cpu().numpy()))


def _smoothed(weights: torch.Tensor, width: int) -> torch.Tensor:
    """Return the median of `width` neighbours of each position."""
    half = width // 2
    if weights.shape[-1] <= half:
        return weights
    padded = torch.nn.functional.pad(weights, (half, half, 0, 0), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., half]


def first_positions(cost: np.ndarray) -> list[int]:
    """Return the first position of each row on the cheapest monotonic path through a matrix [rows, positions]."""
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0
    steps = np.zeros((rows + 1, columns + 1), np.int8)
    # Cells of one anti-diagonal depend on those of the two before alone.
    for diagonal in range(2, rows + columns + 1):
        row = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        column = diagonal - row
        both, up, left = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        step = np.where((both < up) & (both < left), 0, np.where((up < both) & (up < left), 1, 2))
        least = np.choose(step, (both, up, left))
        total[row, column] = cost[row - 1, column - 1] + least
        steps[row, column] = step
    first = [0] * rows
    row, column = rows, columns
    steps[0, :], steps[:, 0] = 2, 1
    while row > 0 or column > 0:
        first[row - 1] = int(column) - 1
        step = steps[row, column]
        row, column = row - (step != 2), column - (step != 1)
    return first
