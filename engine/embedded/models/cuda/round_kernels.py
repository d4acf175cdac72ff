"""Triton kernels between a draft and its verification, and between that and the next draft: what the host does for a
step with drafts, for rounds that it does not take part in."""

# mypy: ignore-errors

from typing import NamedTuple

import torch
import triton
import triton.language as tl

STATE = 5
"""Rows of `RoundTensors.state`."""


class RoundTensors(NamedTuple):
    """Some sequences that are verified again and again, `drafted` drafted tokens at a time."""

    state: torch.Tensor
    """int32 [STATE, sequences]: position of the last known token, that token, the number of rounds so far, the position
    at which the sequence's table of the head begins, and the row of that table, behind all others for padding."""
    inputs: torch.Tensor
    """int32 [4, rows]: the target's inputs, `drafted` + 1 rows for each sequence: tokens, positions, and slots for the
    model and for its sampler."""
    found: torch.Tensor
    """float32 [any, 2, sequences]: the drafted tokens, as the head leaves them."""
    results: torch.Tensor
    """int32 [rounds, sequences, drafted + 2]: how many tokens came of a round, and these."""
    drafted: int


@triton.jit
def _propose(state, inputs, found, size, DRAFTED: tl.constexpr):
    row, rows = tl.program_id(0), tl.num_programs(0)
    start, first = tl.load(state + row), row * (DRAFTED + 1)
    tl.store(inputs + first, tl.load(state + rows + row))
    tl.store(inputs + size + first, start)
    for index in tl.static_range(DRAFTED):
        token = tl.load(found + 2 * index * rows + row).to(tl.int32)
        tl.store(inputs + first + 1 + index, token)
        tl.store(inputs + size + first + 1 + index, start + 1 + index)


def propose(rounds: RoundTensors) -> None:
    """Write the tokens that the target computes in a round, and their positions: the last known one, and the draft."""
    sequences = rounds.state.shape[1]
    _propose[(sequences,)](
        rounds.state, rounds.inputs, rounds.found, rounds.inputs.shape[1], rounds.drafted, num_warps=1
    )


@triton.jit
def _verify(state, inputs, drawn, results, ends, reads, size, DRAFTED: tl.constexpr):
    row, rows = tl.program_id(0), tl.num_programs(0)
    first, start = row * (DRAFTED + 1), tl.load(state + row)
    number, skipped = tl.load(state + 2 * rows + row), tl.load(state + 3 * rows + row)
    owner = tl.load(state + 4 * rows + row)
    target = results + (number * rows + row) * (DRAFTED + 2)
    accepted, right = 0, 1
    for index in tl.static_range(DRAFTED + 1):
        token = tl.load(drawn + first + index).to(tl.int32)
        tl.store(target + 1 + index, token)
        tl.store(reads + first + index, token)
        tl.store(reads + size + first + index, start + index)
        tl.store(reads + 2 * size + first + index, start + index - skipped)
        tl.store(reads + 3 * size + first + index, owner)
        if index < DRAFTED:
            right *= (token == tl.load(inputs + first + 1 + index)).to(tl.int32)
            accepted += right
    tl.store(target, accepted + 1)
    end = start + accepted
    tl.store(ends + row, end)
    tl.store(ends + rows + row, end - skipped)
    tl.store(ends + 2 * rows + row, 0)
    tl.store(ends + 3 * rows + row, first + accepted)
    tl.store(state + row, tl.where(owner < rows, end + 1, start))  # padding stays where it is
    tl.store(state + rows + row, tl.load(drawn + first + accepted).to(tl.int32))
    tl.store(state + 2 * rows + row, number + 1)


def verify(rounds: RoundTensors, drawn: torch.Tensor, ends: torch.Tensor, reads: torch.Tensor) -> None:
    """Accept the drafted tokens that the target has drawn, too, and the one behind them; note them as results, and go
    on behind them.

    `drawn`: int64 [rows]. `ends`, int32 [4, sequences], and `reads`, int32 [4, rows], become what the head reads next:
    the inputs of a `Chain`. It reads rejected tokens, too, and its drafts are written over them.
    """
    sequences = rounds.state.shape[1]
    _verify[(sequences,)](
        rounds.state, rounds.inputs, drawn, rounds.results, ends, reads, rounds.inputs.shape[1], rounds.drafted,
        num_warps=1,
    )  # fmt: skip
