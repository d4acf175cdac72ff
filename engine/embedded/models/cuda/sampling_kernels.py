"""Triton kernels that sample a token for each row of a step: edits, temperature, truncation, the draw, and what is
reported of it.

Five kernels run one after the other, inside the graph of a step; a row that is greedy and unedited leaves all but the
first and last at once. A row is cut into chunks of `CHUNK` ids, so that one row keeps many multiprocessors busy.

1. `_edit`: bias, bans, grammar, penalties; the largest logit of each chunk; the likeliest ids of each chunk.
2. `_weigh`: without truncation, the race within each chunk; else how many ids, of which weight, are above each of
   `LEVELS` thresholds.
3. `_refine`: the same for as many thresholds between the two that truncation ends between.
4. `_collect`: the ids between the two of these; the race among those above both, which are surely kept. With top-k,
   whose ids top-p cuts again, all ids above the lower one are collected.
5. `_choose`: the exact truncation among these by bisection, the race, and the report.

Everything that a request asks for lies in tables with a row for each slot (`engine/embedded/models/cuda/sampler.py`).
What a step computes depends on these, on its logits, positions and input tokens alone, so that it can be drawn again.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = 2048
"""Ids of a row that one program works on."""
LEVELS = 16
CANDIDATES = 8192
"""Maximum number of ids that are collected for a row, which its one program looks at together; if there are more, the
whole row is searched."""
TOP = 20
"""Maximum number of alternatives that are reported."""
REPORT = 3 + 2 * TOP
"""Values of a report: log of the sum of exponentials, the token's logit and rank, then the likeliest logits, and their
ids."""
FIELDS = 16
"""Values of a slot's parameters, int32 or float32, in this order: flags, temperature, top_k, top_p, min_p,
repetition_penalty, frequency_penalty, presence_penalty, the seed's low and high half, prompt tokens, tokens that the
host had counted, min_tokens, alternatives."""

RANDOM = tl.constexpr(1)
"""Flag: drawn, else greedy."""
TRUNCATED = tl.constexpr(2)
"""Flag: top-k or top-p cuts."""
BIASED = tl.constexpr(4)
"""Flag: the slot's row of biases, which are -inf for banned ids, is added."""
PENALISED = tl.constexpr(8)
"""Flag: the slot's row of marks counts output tokens."""
REPORTED = tl.constexpr(16)
"""Flag: log-probabilities are asked for."""

IN_PROMPT = 1
"""Bit of a mark: the id is in the prompt."""
AN_END = 2
"""Bit of a mark: the id is banned until there are min_tokens."""
COUNTED = 4
"""Increment of a mark for each occurrence of the id in the output."""

_NEVER = tl.constexpr(float("-inf"))
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NONE = tl.constexpr(2147483647)
_INFINITE = tl.constexpr(0x7F800000)
"""Bits of the float32 that is infinite: as integers, bits of positive float32 have the order of these."""
_DEPTHS = tl.constexpr(256.0)
"""A depth is how far a scaled logit lies below the largest one, times this: float32 holds all thresholds exactly."""


@triton.jit
def _field(table, slot, field: tl.constexpr, FIELDS: tl.constexpr):
    return tl.load(table + slot * FIELDS + field)


@triton.jit
def _value(table, slot, field: tl.constexpr, FIELDS: tl.constexpr):
    return tl.load(table + slot * FIELDS + field).to(tl.float32, bitcast=True)


@triton.jit
def _row(header, slots, positions, row, INDEXED: tl.constexpr):
    """Return the row of logits and of results that this row is for, its slot and its input's position."""
    if INDEXED:
        source = tl.load(header + row * 4).to(tl.int64)
        slot = tl.load(header + row * 4 + 1).to(tl.int64)
        position = tl.load(header + row * 4 + 2)
    else:
        source = row
        slot = tl.load(slots + row).to(tl.int64)
        position = tl.load(positions + row)
    return source, slot, position.to(tl.int32)


@triton.jit
def _allowed(masks, row, words, ids, inside):
    return ((tl.load(masks + row * words + ids // 32, inside, 0) >> (ids % 32)) & 1) != 0


@triton.jit
def _largest(best, row, chunks, CHUNKS: tl.constexpr):
    each = tl.arange(0, CHUNKS)
    return tl.max(tl.load(best + row * chunks + each, each < chunks, _NEVER), 0)


@triton.jit
def _scaled(values, largest, table, slot, FIELDS: tl.constexpr):
    return tl.div_rn(values - largest, tl.maximum(_value(table, slot, 1, FIELDS), 1e-30))


@triton.jit
def _seed(table, slot, FIELDS: tl.constexpr):
    low = _field(table, slot, 8, FIELDS).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = _field(table, slot, 9, FIELDS).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def _gain(words):
    """Return minus the logarithms of exponential variates, from 32 random bits each."""
    part = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = part * (1 + part * (0.5 + part * (0.33333334 + part * (0.25 + part * (0.2 + part * 0.16666667)))))
    return -tl.log(tl.where(part < 0.0625, series, -tl.log(tl.maximum(1 - part, 5.9604645e-08))))


@triton.jit
def _level(level):
    """Return the depth of a level. Level i lies i² / 16 below the largest scaled logit, from the eighth on further: the
    last lies 30 below it, where no id wins a race any more, as noise adds between -3 and 23."""
    further = tl.maximum(level - 7, 0)
    return 16 * level * level + 64 * further * further


@triton.jit
def _part(level, part):
    """Return the depth at which part 0 to 15 of a level ends. The parts divide the way from the level before evenly;
    part -1 is that level before, or above all ids if this is level 0."""
    above = tl.where(level > 0, _level(level - 1), -1)
    return tl.where((level > 0) | (part < 0), above + (_level(level) - above) // 16 * (part + 1), 0)


@triton.jit
def _first(counts, masses, row, chunks, k, goal, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the first of the thresholds above which there are k ids, or without k the weight `goal`; else the last."""
    chunk, level = tl.arange(0, CHUNKS), tl.arange(0, LEVELS)
    cells = (row * chunks + chunk[:, None]) * LEVELS + level[None, :]
    inside = (chunk < chunks)[:, None] & (level >= 0)[None, :]
    count = tl.sum(tl.load(counts + cells, inside, 0), 0)
    mass = tl.sum(tl.load(masses + cells, inside, 0.0), 0)
    enough = ((k > 0) & (count >= k)) | ((k == 0) & (mass >= goal))
    return tl.min(tl.where(enough, level, LEVELS - 1), 0)


@triton.jit
def _total(totals, row, chunks, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(totals + row * chunks + chunk, chunk < chunks, 0.0), 0)


@triton.jit
def _above(coarse, fine, level, part, row, chunks, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """Return what is above a part of a level, or the level above for part -1, in each chunk."""
    chunk = tl.arange(0, CHUNKS)
    cells, inside = (row * chunks + chunk) * LEVELS, chunk < chunks
    found = tl.load(fine + cells + part, inside & (part >= 0), 0)
    return found + tl.load(coarse + cells + level - 1, inside & (part < 0) & (level > 0), 0)


@triton.jit
def _store_above(scaled, weights, depth, counts, masses, at):
    """Store how many ids of a chunk are above a depth, and what they weigh."""
    above = scaled * -_DEPTHS <= depth
    tl.store(counts + at, tl.sum(above.to(tl.int32), 0))
    tl.store(masses + at, tl.sum(tl.where(above, weights, 0.0), 0))


@triton.jit
def _raced(scaled, groups, seed, outputs, least):
    """Return the race of chunks of ids: `groups` are fourths of these."""
    none = groups * 0
    a, b, c, d = tl.philox(seed, groups, none + outputs, none, none)
    gain = _gain(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))
    return tl.where(tl.exp(scaled) < least, _NEVER, scaled) + gain


@triton.jit(do_not_specialize_on_alignment=["logits", "slots", "positions", "tokens"])
def _edit(
    logits, header, slots, positions, tokens, masks, table, biases, marks, edited, best, best_at, raw_best, raw_sum,
    top, top_at, vocab, words, chunks,
    INDEXED: tl.constexpr, FIELDS: tl.constexpr, CHUNK: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gdc_wait()
    gdc_launch_dependents()
    source, slot, position = _row(header, slots, positions, row, INDEXED)
    flags = _field(table, slot, 0, FIELDS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    raw = tl.load(logits + source * vocab + ids, inside, _NEVER).to(tl.float32)
    raw = tl.where(raw == raw, raw, _NEVER)
    value = raw
    if flags & BIASED:
        value += tl.load(biases + slot * vocab + ids, inside, 0.0)
    if INDEXED:
        value = tl.where(_allowed(masks, row, words, ids, inside), value, _NEVER)
    outputs = position + 1 - _field(table, slot, 10, FIELDS)
    early = outputs < _field(table, slot, 12, FIELDS)
    if ((flags & PENALISED) != 0) | early:
        mark = tl.load(marks + slot * vocab + ids, inside, 0)
        if not INDEXED:
            if (flags & PENALISED) != 0:
                if position >= _field(table, slot, 11, FIELDS):
                    new = inside & (ids == tl.load(tokens + row))
                    mark += tl.where(new, 4, 0)
                    tl.store(marks + slot * vocab + ids, mark, new)
        if early:
            value = tl.where((mark & 2) != 0, _NEVER, value)
        count = mark >> 2
        repetition = _value(table, slot, 5, FIELDS)
        divisor = tl.where(value > 0, repetition, tl.div_rn(1.0, repetition))
        value = tl.div_rn(value, tl.where(((mark & 1) != 0) | (count > 0), divisor, 1.0))
        value -= _value(table, slot, 6, FIELDS) * count.to(tl.float32)
        value -= tl.where(count > 0, _value(table, slot, 7, FIELDS), 0.0)
    if flags & RANDOM:
        tl.store(edited + row * vocab + ids, value, inside)
    cell = row * chunks + chunk
    most = tl.max(value, 0)
    tl.store(best + cell, most)
    tl.store(best_at + cell, tl.min(tl.where(value == most, ids, _NONE), 0))
    if flags & REPORTED:
        most = tl.max(raw, 0)
        tl.store(raw_best + cell, most)
        tl.store(raw_sum + cell, tl.sum(tl.exp(raw - tl.maximum(most, _LOWEST)), 0))
        left = tl.where(inside, tl.maximum(raw, _LOWEST), _NEVER)
        for index in range(_field(table, slot, 13, FIELDS)):
            most = tl.max(left, 0)
            at = tl.min(tl.where(left == most, ids, _NONE), 0)
            tl.store(top + cell * TOP + index, most)
            tl.store(top_at + cell * TOP + index, at)
            left = tl.where(ids == at, _NEVER, left)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _weigh(
    header, slots, positions, masks, table, ends, edited, best, scores, scores_at, counts, masses, totals,
    vocab, words, chunks, num_ends,
    INDEXED: tl.constexpr, FIELDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gdc_wait()
    gdc_launch_dependents()
    _, slot, position = _row(header, slots, positions, row, INDEXED)
    flags = _field(table, slot, 0, FIELDS)
    largest = _largest(best, row, chunks, CHUNKS)
    stuck = largest == _NEVER
    if ((flags & RANDOM) == 0) & (not stuck):
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    cell = row * chunks + chunk
    scaled = tl.zeros((CHUNK,), tl.float32)
    if stuck:
        if INDEXED:
            allowed = inside & _allowed(masks, row, words, ids, inside)
        else:
            allowed = ids < 0
            for index in range(num_ends):
                allowed = allowed | (ids == tl.load(ends + index))
        scaled = tl.where(allowed, 0.0, _NEVER)
    else:
        scaled = _scaled(tl.load(edited + row * vocab + ids, inside, _NEVER), largest, table, slot, FIELDS)
    if ((flags & TRUNCATED) != 0) & (not stuck):
        weights = tl.exp(scaled)
        tl.store(totals + cell, tl.sum(weights, 0))
        for level in tl.static_range(LEVELS):
            _store_above(scaled, weights, _level(level), counts, masses, cell * LEVELS + level)
        return
    if (flags & RANDOM) != 0:
        groups = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        outputs = position + 1 - _field(table, slot, 10, FIELDS)
        scaled = _raced(scaled, groups, _seed(table, slot, FIELDS), outputs, _value(table, slot, 4, FIELDS))
    most = tl.max(scaled, 0)
    tl.store(scores + cell, most)
    tl.store(scores_at + cell, tl.min(tl.where(scaled == most, ids, _NONE), 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _refine(
    header, slots, positions, table, edited, best, counts, masses, totals, levels, fine_counts, fine_masses, vocab,
    chunks,
    INDEXED: tl.constexpr, FIELDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gdc_wait()
    gdc_launch_dependents()
    _, slot, _ = _row(header, slots, positions, row, INDEXED)
    if (_field(table, slot, 0, FIELDS) & TRUNCATED) == 0:
        return
    largest = _largest(best, row, chunks, CHUNKS)
    if largest == _NEVER:
        return
    k, p = _field(table, slot, 2, FIELDS), _value(table, slot, 3, FIELDS)
    goal = p * _total(totals, row, chunks, CHUNKS)
    level = _first(counts, masses, row, chunks, k, goal, CHUNKS, LEVELS)
    tl.store(levels + row, level)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    scaled = _scaled(tl.load(edited + row * vocab + ids, ids < vocab, _NEVER), largest, table, slot, FIELDS)
    weights = tl.exp(scaled)
    cell = (row * chunks + chunk) * LEVELS
    for part in tl.static_range(LEVELS):
        _store_above(scaled, weights, _part(level, part), fine_counts, fine_masses, cell + part)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _collect(
    header, slots, positions, table, edited, best, scores, scores_at, counts, masses, totals, levels, fine_counts,
    fine_masses, found, found_at, bounds, kept, vocab, chunks,
    INDEXED: tl.constexpr, FIELDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LEVELS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gdc_wait()
    gdc_launch_dependents()
    _, slot, position = _row(header, slots, positions, row, INDEXED)
    if (_field(table, slot, 0, FIELDS) & TRUNCATED) == 0:
        return
    largest = _largest(best, row, chunks, CHUNKS)
    if largest == _NEVER:
        return
    k, p = _field(table, slot, 2, FIELDS), _value(table, slot, 3, FIELDS)
    total = _total(totals, row, chunks, CHUNKS)
    level = tl.load(levels + row)
    part = _first(fine_counts, fine_masses, row, chunks, k, p * total, CHUNKS, LEVELS)
    upper, lower = _part(level, part), tl.where(k > 0, -1, _part(level, part - 1))
    each = _above(counts, fine_counts, level, part, row, chunks, CHUNKS, LEVELS)
    mass = 0.0
    if k == 0:
        each -= _above(counts, fine_counts, level, part - 1, row, chunks, CHUNKS, LEVELS)
        mass = tl.sum(_above(masses, fine_masses, level, part - 1, row, chunks, CHUNKS, LEVELS), 0)
    count = tl.sum(each, 0)
    whole = count > CANDIDATES
    if chunk == 0:
        tl.store(bounds + row * 3, tl.where(whole, -1, count))
        tl.store(bounds + row * 3 + 1, lower)
        tl.store(bounds + row * 3 + 2, upper)
        tl.store(kept + row * 2, mass)
        tl.store(kept + row * 2 + 1, total)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    most, at = _NEVER, _NONE
    if not whole:
        value = tl.load(edited + row * vocab + ids, ids < vocab, _NEVER)
        scaled = _scaled(value, largest, table, slot, FIELDS)
        depth = scaled * -_DEPTHS
        listed = (depth > lower) & (depth <= upper)
        place = row * CANDIDATES + tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, each, 0), 0)
        place += tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(found + place, value, listed)
        tl.store(found_at + place, ids, listed)
        if k == 0:
            groups = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
            outputs = position + 1 - _field(table, slot, 10, FIELDS)
            score = _raced(scaled, groups, _seed(table, slot, FIELDS), outputs, _value(table, slot, 4, FIELDS))
            score = tl.where(depth <= lower, score, _NEVER)
            most = tl.max(score, 0)
            at = tl.min(tl.where(score == most, ids, _NONE), 0)
    tl.store(scores + row * chunks + chunk, most)
    tl.store(scores_at + row * chunks + chunk, at)


@triton.jit
def _bits(scaled):
    """Return float32 that are not positive as integers that rise as these fall."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _best_of(scaled, kept, ids, seed, outputs, least):
    """Return the score and the id of the one of these ids, in any order, that wins their race."""
    none = ids * 0
    a, b, c, d = tl.philox(seed, ids // 4, none + outputs, none, none)
    words = tl.where(ids % 4 < 2, tl.where(ids % 4 == 0, a, b), tl.where(ids % 4 == 2, c, d))
    score = tl.where(kept & (tl.exp(scaled) >= least), scaled + _gain(words), _NEVER)
    most = tl.max(score, 0)
    return most, tl.min(tl.where(score == most, ids, _NONE), 0)


@triton.jit
def _end_in_list(bits, weights, low, last, mass, goal):
    """Return the least bits, up to `last`, at which the ids before them and `mass` reach `goal`; `low` do not."""
    while last - low > 1:
        middle = low + (last - low) // 2
        if mass + tl.sum(tl.where(bits <= middle, weights, 0.0), 0) >= goal:
            last = middle
        else:
            low = middle
    return last


@triton.jit
def _of_list(scaled, ids, inside, lower, upper, k, p, mass, total, seed, outputs, least):
    """Return the winner's score and id among collected ids, of which truncation keeps some: it ends between two
    depths, and those above both weigh `mass` of `total`."""
    bits = _bits(scaled)
    weights = tl.where(inside, tl.exp(scaled), 0.0)
    low = tl.where(lower >= 0, _bits(lower.to(tl.float32) / _DEPTHS), -1)
    last = _bits(upper.to(tl.float32) / _DEPTHS)
    if k > 0:
        last = _end_in_list(bits, inside.to(tl.float32), low, last, 0.0, k)
        total = tl.sum(tl.where(bits <= last, weights, 0.0), 0)
    if p < 1:
        last = _end_in_list(bits, weights, low, last, mass, p * total)
    return _best_of(scaled, inside & (bits <= last), ids, seed, outputs, least)


@triton.jit
def _sum_in_row(
    values, vocab, largest, table, slot, last, COUNTED: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return how many ids of a row come up to these bits, or what they weigh."""
    found = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = _scaled(tl.load(values + ids, ids < vocab, _NEVER), largest, table, slot, FIELDS)
        kept = (ids < vocab) & (_bits(scaled) <= last)
        found += kept.to(tl.float32) if COUNTED else tl.where(kept, tl.exp(scaled), 0.0)
    return tl.sum(found, 0)


@triton.jit
def _end_in_row(
    values, vocab, largest, table, slot, last, goal, COUNTED: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the least bits, up to `last`, at which that sum reaches `goal`."""
    low = -1
    while last - low > 1:
        middle = low + (last - low) // 2
        if _sum_in_row(values, vocab, largest, table, slot, middle, COUNTED, FIELDS, BLOCK) >= goal:
            last = middle
        else:
            low = middle
    return last


@triton.jit
def _of_row(
    values, vocab, largest, table, slot, k, p, total, seed, outputs, least, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the winner's score and id in a whole row, of which truncation keeps a part."""
    last = _INFINITE
    if k > 0:
        last = _end_in_row(values, vocab, largest, table, slot, last, k, True, FIELDS, BLOCK)
        total = _sum_in_row(values, vocab, largest, table, slot, last, False, FIELDS, BLOCK)
    if p < 1:
        last = _end_in_row(values, vocab, largest, table, slot, last, p * total, False, FIELDS, BLOCK)
    winner, token = _NEVER, _NONE
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = _scaled(tl.load(values + ids, ids < vocab, _NEVER), largest, table, slot, FIELDS)
        most, at = _best_of(scaled, (ids < vocab) & (_bits(scaled) <= last), ids, seed, outputs, least)
        if most > winner:
            winner = most
            token = at
    return winner, token


@triton.jit(do_not_specialize_on_alignment=["logits", "slots", "positions", "chosen", "reports"])
def _choose(
    logits, header, slots, positions, table, edited, best, best_at, scores, scores_at, found, found_at, bounds, kept,
    raw_best, raw_sum, top, top_at, chosen, sampled, reports, vocab, chunks,
    INDEXED: tl.constexpr, FIELDS: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr, TOP: tl.constexpr,
    ENTRIES: tl.constexpr, REPORT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gdc_wait()
    gdc_launch_dependents()
    source, slot, position = _row(header, slots, positions, row, INDEXED)
    flags = _field(table, slot, 0, FIELDS)
    each = tl.arange(0, CHUNKS)
    largest = _largest(best, row, chunks, CHUNKS)
    if ((flags & RANDOM) != 0) | (largest == _NEVER):
        score = tl.load(scores + row * chunks + each, each < chunks, _NEVER)
        at = tl.load(scores_at + row * chunks + each, each < chunks, _NONE)
    else:
        score = tl.load(best + row * chunks + each, each < chunks, _NEVER)
        at = tl.load(best_at + row * chunks + each, each < chunks, _NONE)
    most = tl.max(score, 0)
    token = tl.min(tl.where(score == most, at, _NONE), 0)
    if ((flags & TRUNCATED) != 0) & (largest > _NEVER):
        k, p = _field(table, slot, 2, FIELDS), _value(table, slot, 3, FIELDS)
        seed, outputs = _seed(table, slot, FIELDS), position + 1 - _field(table, slot, 10, FIELDS)
        least, total = _value(table, slot, 4, FIELDS), tl.load(kept + row * 2 + 1)
        count = tl.load(bounds + row * 3)
        if count >= 0:
            place = tl.arange(0, CANDIDATES)
            inside = place < count
            value = tl.load(found + row * CANDIDATES + place, inside, _NEVER)
            ids = tl.load(found_at + row * CANDIDATES + place, inside, 0)
            lower, upper = tl.load(bounds + row * 3 + 1), tl.load(bounds + row * 3 + 2)
            scaled, mass = _scaled(value, largest, table, slot, FIELDS), tl.load(kept + row * 2)
            other, other_at = _of_list(scaled, ids, inside, lower, upper, k, p, mass, total, seed, outputs, least)
        else:
            other, other_at = _of_row(
                edited + row * vocab, vocab, largest, table, slot, k, p, total, seed, outputs, least, FIELDS, CANDIDATES
            )
        if other > most:
            token = other_at
    token = tl.minimum(token, vocab - 1)
    tl.store(chosen + source, token.to(tl.int64))
    tl.store(sampled + slot, token.to(tl.int64))
    if flags & REPORTED:
        report = reports + source * REPORT
        own = tl.load(logits + source * vocab + token).to(tl.float32)
        peaks = tl.load(raw_best + row * chunks + each, each < chunks, _NEVER)
        highest = tl.max(peaks, 0)
        parts = tl.load(raw_sum + row * chunks + each, each < chunks, 0.0)
        total = tl.sum(parts * tl.exp(peaks - tl.maximum(highest, _LOWEST)), 0)
        above = tl.zeros((CANDIDATES,), tl.int32)
        for start in range(0, vocab, CANDIDATES):
            place = start + tl.arange(0, CANDIDATES)
            above += (tl.load(logits + source * vocab + place, place < vocab, _NEVER).to(tl.float32) > own).to(tl.int32)
        tl.store(report, highest + tl.log(total))
        tl.store(report + 1, own)
        tl.store(report + 2, (tl.sum(above, 0) + 1).to(tl.float32))
        entry, asked = tl.arange(0, ENTRIES), _field(table, slot, 13, FIELDS)
        inside = (entry < chunks * TOP) & (entry % TOP < asked)
        left = tl.load(top + row * chunks * TOP + entry, inside, _NEVER)
        first_at = tl.load(top_at + row * chunks * TOP + entry, inside, _NONE)
        for index in range(asked):
            most = tl.max(left, 0)
            one = tl.min(tl.where(left == most, first_at, _NONE), 0)
            tl.store(report + 3 + index, most)
            tl.store(report + 3 + TOP + index, one.to(tl.float32))
            left = tl.where(first_at == one, _NEVER, left)


class Kernels:
    """The kernels, and the memory between them, for up to `rows` rows of `vocab` logits."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.rows = rows
        self.vocab = vocab
        self._chunks = chunks = triton.cdiv(vocab, CHUNK)

        def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=device)

        def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
            return scratch(*shape), scratch(*shape, dtype=torch.int32)

        self._edited = scratch(vocab)
        self._best = pair(chunks)
        self._scores = pair(chunks)
        self._top = pair(chunks, TOP)
        self._found = pair(CANDIDATES)
        self._raw = scratch(chunks), scratch(chunks)
        self._counts = scratch(chunks, LEVELS, dtype=torch.int32)
        self._masses = scratch(chunks, LEVELS)
        self._totals = scratch(chunks)
        self._levels = scratch(dtype=torch.int32)
        self._fine = scratch(chunks, LEVELS, dtype=torch.int32), scratch(chunks, LEVELS)
        self._bounds = scratch(3, dtype=torch.int32)
        """Number of collected ids, -1 if the whole row is searched, and the two depths that they lie between."""
        self._kept = scratch(2)
        """Weight of the ids above both depths, and of all."""

    def __call__(
        self,
        logits: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        ends: torch.Tensor,
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        guided: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Draw a token for each row.

        `logits` [n, vocab]. `tables`: parameters, int32 [slots, FIELDS]; biases, float32 [slots, vocab]; marks, int32
        [slots, vocab]. `ends`: int32, the ids that are allowed when masks allow none. `results`: tokens, int64 [n]; the
        last token of each slot, int64 [slots]; reports, float32 [n, REPORT].

        Either `rows`: the slots, positions and input tokens of all rows of logits; input tokens are counted. Or
        `guided` rows alone, which are not counted: a header, int32 [m, 4], of row of logits, slot and position, and
        bitmasks, int32 [m, ceil(vocab / 32)].
        """
        table, biases, marks = tables
        chosen, sampled, reports = results
        vocab, chunks = self.vocab, self._chunks
        width, indexed = triton.next_power_of_2(chunks), guided is not None
        if guided is not None:
            header, masks = guided
            slots = positions = tokens = header
            count = len(header)
        else:
            slots, positions, tokens = rows
            header = masks = table
            count = len(logits)
        assert logits.shape[1] == vocab and logits.is_contiguous() and count <= self.rows
        words = -(-vocab // 32)
        of_rows = header, slots, positions
        grid = count, chunks
        overlap = not indexed  # outside graphs, as guided rows are drawn, it makes the next graph slower
        _edit[grid](
            logits, *of_rows, tokens, masks, table, biases, marks, self._edited, *self._best, *self._raw, *self._top,
            vocab, words, chunks, indexed, FIELDS, CHUNK, TOP, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        _weigh[grid](
            *of_rows, masks, table, ends, self._edited, self._best[0], *self._scores, self._counts, self._masses,
            self._totals, vocab, words, chunks, len(ends), indexed, FIELDS, CHUNK, width, LEVELS,
            num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        _refine[grid](
            *of_rows, table, self._edited, self._best[0], self._counts, self._masses, self._totals, self._levels,
            *self._fine, vocab, chunks, indexed, FIELDS, CHUNK, width, LEVELS, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        _collect[grid](
            *of_rows, table, self._edited, self._best[0], *self._scores, self._counts, self._masses, self._totals,
            self._levels, *self._fine, *self._found, self._bounds, self._kept, vocab, chunks,
            indexed, FIELDS, CHUNK, width, LEVELS, CANDIDATES, num_warps=4, launch_pdl=overlap,
        )  # fmt: skip
        _choose[(count,)](
            logits, *of_rows, table, self._edited, *self._best, *self._scores, *self._found, self._bounds, self._kept,
            *self._raw, *self._top, chosen, sampled, reports, vocab, chunks,
            indexed, FIELDS, width, CANDIDATES, TOP, triton.next_power_of_2(chunks * TOP), REPORT,
            num_warps=16, launch_pdl=overlap,
        )  # fmt: skip
