"""Triton kernels of an EAGLE-3 head: what is before its layer, and what is behind. Each draft runs them once for every
token, so they replace a dozen small operations each."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOGITS = 4096
"""Number of logits that a program looks at together."""
_LEAST = tl.constexpr(-1e30)
"""Less than any logit: infinity minus infinity would be no number."""


@triton.jit
def _normed(value, weight, size, epsilon, dtype: tl.constexpr):
    value *= tl.rsqrt(tl.sum(value * value) / size + epsilon)
    return (value.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize_on_alignment=["tokens", "places"])  # they lie behind one another
def _enter(
    tokens, embeddings, hidden, places, tables, width, token_norm, hidden_norm, epsilon, out, slots, size,
    BLOCK_SIZE: tl.constexpr, NORM_BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    of_token, of_hidden = tl.load(token_norm + columns, inside, 0.0), tl.load(hidden_norm + columns, inside, 0.0)
    gdc_wait()
    token, place = tl.load(tokens + row), tl.load(places + row)
    embedded = tl.load(embeddings + token.to(tl.int64) * size + columns, inside, 0.0).to(tl.float32)
    entered = tl.load(hidden + row * size + columns, inside, 0.0).to(tl.float32)
    block = tl.load(tables + row * width + place // BLOCK_SIZE).to(tl.int64)
    gdc_launch_dependents()
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(slots + row, block * (2 * BLOCK_SIZE) + place % BLOCK_SIZE)
    target = out + row * 2 * size + columns
    tl.store(target, _normed(embedded, of_token, size, epsilon, dtype), inside)
    normed = _normed(entered, of_hidden, size, epsilon, dtype)
    tl.store(target + size, normed, inside)
    if NORM_BEFORE:
        tl.store(hidden + row * size + columns, normed, inside)


def enter(
    tokens: torch.Tensor,
    embeddings: torch.Tensor,
    hidden: torch.Tensor,
    places: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    norms: tuple[torch.Tensor, torch.Tensor, float],
    norm_before_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a head's layer takes: the normalised embeddings of tokens, and beside them the hidden states, [rows,
    2 * size]; and the cache row of each, int64 [rows].

    `tokens` and `places`: int32 [rows]; a position is at its place of its table in `tables`, int32 [rows, blocks].
    A block has `block_size` cache rows of keys, then as many of values. `embeddings` [vocabulary, size]; `hidden`
    [rows, size], which become the normalised ones if the residual stream begins behind that norm.
    `norms`: weights for embeddings and for hidden states, and their epsilon.
    """
    rows, size = hidden.shape
    token_norm, hidden_norm, epsilon = norms
    out = hidden.new_empty((rows, 2 * size))
    slots = torch.empty(rows, dtype=torch.int64, device=hidden.device)
    _enter[(rows,)](
        tokens, embeddings, hidden, places, tables, tables.shape[1], token_norm, hidden_norm, epsilon, out,
        slots, size, block_size, norm_before_residual, triton.next_power_of_2(size), num_warps=8, launch_pdl=True,
    )  # fmt: skip
    return out, slots


@triton.jit
def _choose(
    logits, drafted, found, tokens, positions, places, numbers, size, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, rows = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), _LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    gdc_wait()
    for start in range(0, size, BLOCK):
        column = start + columns
        logit = tl.load(logits + row.to(tl.int64) * size + column, column < size, _LEAST).to(tl.float32)
        most = tl.maximum(best, logit)
        total = total * tl.exp(best - most) + tl.where(column < size, tl.exp(logit - most), 0.0)
        where = tl.where(logit > best, column, where)
        best = most
    gdc_launch_dependents()
    most = tl.max(best)
    probability = 1.0 / tl.sum(total * tl.exp(best - most))
    place = tl.min(tl.where(best == most, where, size))
    token = tl.load(drafted + place)
    number = tl.load(numbers + row)
    target = found + number * 2 * rows + row
    tl.store(target, token.to(tl.float32), number < COUNT)
    tl.store(target + rows, probability, number < COUNT)
    tl.store(tokens + row, token.to(tl.int32))
    tl.store(numbers + row, number + 1)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(places + row, tl.load(places + row) + 1)


def choose(
    logits: torch.Tensor,
    drafted: torch.Tensor,
    found: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """Note the likeliest token of each row, and go on to the next position.

    `logits` [rows, size]; `drafted` [size]: the token that each is of. `found`, float32 [any, 2, rows], gets the tokens
    and their probabilities at the row's number in `numbers`. `tokens` become those; `positions`, `places` and `numbers`
    become one more: all int32 [rows].
    """
    rows, size = logits.shape
    _choose[(rows,)](
        logits, drafted, found, tokens, positions, places, numbers, size, len(found),
        min(_LOGITS, triton.next_power_of_2(size)), num_warps=8, launch_pdl=True,
    )  # fmt: skip
