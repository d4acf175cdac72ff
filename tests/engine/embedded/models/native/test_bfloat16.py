"""Arithmetic of bfloat16: rows computed one by one, in tiles and by other instructions are the same to the bit."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.embedded.models.native import levels
from engine.embedded.models.native.levels import LEVELS, Arithmetic, available
from tests.engine.embedded.models.native.test_native import load, make_folder, tokens_of
from tests.support.steps import Part, step_of

ROUNDING = [level for level in LEVELS if level.products != Arithmetic.FLOATS]


@pytest.mark.parametrize("rounding", ROUNDING, ids=lambda level: level.name)
@pytest.mark.parametrize("scale", [1.0, 2.0**-122])
def test_ordinary_instructions_compute_the_same_bits(
    tmp_path: Path, rounding: levels.Level, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of weights so small that products and sums are subnormal numbers, which count as zeros."""
    if rounding not in available():
        pytest.skip("this processor has only the ordinary instructions")
    ordinary = next(level for level in LEVELS if level.name == "avx512_vnni")
    plain = rounding._replace(name="plain", flags=ordinary.flags)
    monkeypatch.setattr(levels, "LEVELS", (*LEVELS, plain))
    folder = make_folder(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data *= scale
    model.save_pretrained(folder)
    for tokens in (tokens_of(1, 1), tokens_of(3, 2), tokens_of(16, 3), tokens_of(75, 4)):
        step = step_of([Part(tokens, [0, 1, 2], 0, len(tokens))])
        logits = load(folder, cpu_isa=rounding.name).forward(step)
        assert logits.isfinite().all() and logits.abs().max() > 0
        assert torch.equal(load(folder, cpu_isa="plain").forward(step), logits)


def test_rows_that_are_multiplied_together_get_the_bits_of_rows_alone(tmp_path: Path, level: str) -> None:
    """Also of a weight too long for the first cache, which tiles multiply in several parts."""
    model = load(make_folder(tmp_path, intermediate_size=1300, num_hidden_layers=1), cpu_isa=level, num_blocks=128)
    tokens, table = tokens_of(400, 5), list(range(60))
    alone = torch.cat([model.forward(step_of([Part(tokens, table, row, 1)])).clone() for row in range(400)])
    for rows in (2, 3, 16, 17, 32, 33, 75, 193, 400):
        assert torch.equal(model.forward(step_of([Part(tokens, table, 0, rows)])), alone[:rows])
