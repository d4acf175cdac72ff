"""Changes to logits that requests ask for before a token is drawn: bias, penalties, masks and logits processors, over a
batch of rows.

Each function works only on the rows that ask for it. A masked id is -inf. Masks are hard: they hold after the
penalties, and are put back over what a logits processor wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.embedded.grammar.compiler import apply_bitmask, fill_bitmask, new_bitmask
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sampling.truncation import put, take
from engine.types import SamplingParams

_MASKED = float("-inf")


def edit(logits: torch.Tensor, states: Sequence[SamplerState], *, guide_all: bool = True) -> None:
    """Apply everything but temperature and truncation, in place. `logits` is float32 [len(states), vocab]. Without
    `guide_all`, skip the grammars of rows that are drawn before their mask."""
    _add_bias(logits, states)
    masked = [row for row, state in enumerate(states) if state.has_mask]
    guided = [row for row, state in enumerate(states) if state.matcher and (guide_all or not state.draws_before_mask)]
    bitmask = _fill_bitmask(logits.shape[1], states, guided)
    _mask(logits, states, masked)
    _guide(logits, bitmask, guided)
    _penalise(logits, states)
    processed = [row for row, state in enumerate(states) if state.processors]
    for row in processed:
        states[row].process(logits[row])
    _mask(logits, states, [row for row in processed if states[row].has_mask])
    _guide(logits, bitmask, [row for row in guided if states[row].processors])
    _repair(logits, states, [row for row in masked if states[row].may_mask_all], bitmask)


def guide(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Apply the grammars of rows that `edit` left without, in place. `logits` is float32 [len(states), vocab]."""
    rows = range(len(states))
    _guide(logits, _fill_bitmask(logits.shape[1], states, rows), rows)


def _add_bias(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    rows = [row for row, state in enumerate(states) if state.bias is not None]
    if rows:
        biases = [bias for state in states if (bias := state.bias) is not None]
        index = _flat(logits, rows, [bias.ids for bias in biases])
        logits.view(-1).index_add_(0, index, torch.cat([bias.values for bias in biases]))


def _penalise(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Apply repetition (multiplicative, prompt and output), then presence and frequency penalties (subtractive,
    output only), to the ids that have occurred. On a CPU by NumPy, which takes a quarter of torch's time for so few."""
    for row, state in enumerate(states):
        if (occurrences := state.occurrences) is None:
            continue
        ids = occurrences.seen.nonzero()[0]
        counts = occurrences.counts[ids]
        if logits.device.type == "cpu":
            values = logits.numpy()[row]
            values[ids] = penalised(values[ids], counts, state.sampling, np.where, np.float32)
        else:
            index, on_device = (torch.from_numpy(array).to(logits.device) for array in (ids, counts))
            scalar = partial(torch.tensor, device=logits.device)
            logits[row, index] = penalised(logits[row, index], on_device, state.sampling, torch.where, scalar)


def penalised(
    values: Any, counts: Any, sampling: SamplingParams, where: Callable[..., Any], scalar: Callable[[float], Any]
) -> Any:
    """Return logits, float32 [ids], with penalties for ids that are `counts` times in the output. `where` and `scalar`,
    which makes a float32, are NumPy's or torch's; the result is the same to the bit."""
    if sampling.repetition_penalty != 1:
        # Both ways of the repetition penalty are a division, of positive logits by it and of others by its inverse.
        repetition = scalar(sampling.repetition_penalty)
        values = values / where(values > 0, repetition, 1 / repetition)
    if sampling.frequency_penalty:
        values = values - sampling.frequency_penalty * counts
    if sampling.presence_penalty:
        values = where(counts > 0, values - sampling.presence_penalty, values)
    return values


def _mask(logits: torch.Tensor, states: Sequence[SamplerState], rows: Sequence[int]) -> None:
    """Apply all masks but those of grammars."""
    if not rows:
        return
    narrow = [row for row in rows if states[row].forbidden is not None]
    if narrow:
        forbidden = torch.stack([mask for row in narrow if (mask := states[row].forbidden) is not None])
        put(logits, narrow, take(logits, narrow).masked_fill_(forbidden, _MASKED))
    banned = [(row, token) for row in rows for token in states[row].banned()]
    if banned:
        index = torch.tensor(banned, device=logits.device)
        logits[index[:, 0], index[:, 1]] = _MASKED


def _fill_bitmask(vocab_size: int, states: Sequence[SamplerState], rows: Sequence[int]) -> torch.Tensor | None:
    """Return a bitmask in which `rows` are those of their grammars; None if there are none."""
    if not rows:
        return None
    bitmask = new_bitmask(len(states), vocab_size)
    fill_bitmask(bitmask, {row: matcher for row in rows if (matcher := states[row].matcher) is not None})
    return bitmask


def _guide(logits: torch.Tensor, bitmask: torch.Tensor | None, rows: Sequence[int]) -> None:
    if rows and bitmask is not None:
        apply_bitmask(logits, bitmask, rows)


def _repair(
    logits: torch.Tensor, states: Sequence[SamplerState], rows: Sequence[int], bitmask: torch.Tensor | None
) -> None:
    """Repair rows whose masks contradict each other and leave nothing: the grammar alone decides, and without one
    the sequence ends."""
    if not rows:
        return
    part = take(logits, rows)
    best = part.numpy().max(axis=1) if part.device.type == "cpu" else part.amax(dim=1)
    empty = [row for row, value in zip(rows, best.tolist(), strict=True) if value == _MASKED]
    for row in empty:
        if states[row].matcher is not None:
            logits[row] = 0
        else:
            logits[row, list(states[row].eos_token_ids or (0,))] = 0
    _guide(logits, bitmask, [row for row in empty if states[row].matcher is not None])


def _flat(logits: torch.Tensor, rows: Sequence[int], ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the indices into `logits.view(-1)` of `ids[i]` in row `rows[i]`."""
    return torch.cat([row * logits.shape[1] + part for row, part in zip(rows, ids, strict=True)])
