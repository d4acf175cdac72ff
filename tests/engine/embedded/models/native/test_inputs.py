import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.embedded.models.native import inputs
from engine.embedded.models.native.inputs import StepInputs
from engine.embedded.models.rotary import Rotary

ROTARIES = (Rotary(torch.tensor([1.0, 0.25, 0.01])), Rotary(torch.tensor([0.5, 0.125, 0.02]), 1.25))


def read(address: int, shape: tuple[int, ...], kind: type[ctypes.c_float | ctypes.c_int32]) -> NDArray[np.generic]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), shape).copy()


@pytest.mark.parametrize("positions", [[5], [0, 7, 3], [2, 9], [11], list(range(12)), [3]], ids=str)
@pytest.mark.parametrize("kinds", [1, 2])
def test_turns_are_those_of_the_rotary_positions(
    monkeypatch: pytest.MonkeyPatch, kinds: int, positions: Sequence[int]
) -> None:
    """In the table or behind it, and again behind others."""
    monkeypatch.setattr(inputs, "_TABLE", 8)
    found = StepInputs(ROTARIES[:kinds], 12, vocab_size=5)
    for asked in (positions, positions[::-1]):
        turns = found.turns(asked)
        for place, address in enumerate((turns.cos, turns.sin)):
            expected = np.stack([rotary.turns(asked)[place] for rotary in ROTARIES[:kinds]])
            known = read(address, (kinds, turns.size, expected.shape[2]), ctypes.c_float)
            assert np.array_equal(known[:, [*turns.indices]], expected)


@pytest.mark.parametrize("count", [3, 5000])
def test_integers_lie_behind_each_other(count: int) -> None:
    found = StepInputs(ROTARIES, 12, vocab_size=5)
    parts = [*range(count)], (), [7, -8], [2**31 - 1]
    for _ in range(2):
        addresses = found.write(*parts)
        for part, address in zip(parts, addresses, strict=True):
            assert read(address, (len(part),), ctypes.c_int32).tolist() == [*part]


def test_logits_of_few_rows_are_always_in_the_same_memory() -> None:
    found = StepInputs(ROTARIES, 12, vocab_size=5)
    assert found.logits(64).data_ptr() == found.logits(1).data_ptr() == found.logits(64).data_ptr()
    assert [tuple(found.logits(rows).shape) for rows in (0, 1, 64, 66)] == [(0, 5), (1, 5), (64, 5), (66, 5)]
