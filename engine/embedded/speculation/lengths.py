"""Chooses how many drafted tokens a step computes: those that raise the tokens per second, by measured costs.

A draft's next token is worth the probability that all of it up to there is right. It costs what one more row makes a
step longer. Tokens are added in order of their worth, and none unless the step becomes faster by a margin. Load counts
by itself: where rows are dear, drafts become short.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Many

from engine.embedded.speculation.costs import Costs

_TRIAL_STEPS = 2.0
"""Time that the drafts of a trial may take, in steps without any, as far as their costs are known."""


def can_pay(costs: Costs, rows: int, most: int, min_speedup: float) -> bool:
    """Return whether `most` drafted tokens for each of a step's sequences are worth it if every one is right."""
    plain = costs.plain.at(rows)
    return not plain or (1 + most) * plain > min_speedup * costs.drafted.at((1 + most) * rows)


def worthwhile(
    chances: Iterable[Iterable[float]], rows: int, costs: Costs, min_speedup: float, drafting: float = 0.0
) -> list[int]:
    """Return how many tokens of each draft to compute in a step that decodes `rows` sequences: none unless it becomes
    `min_speedup` times as fast. `chances`: the probabilities that a draft is right up to each of its tokens, which
    fall. `drafting`: the seconds that it takes to draft a token."""
    row, plain = costs.drafted.row + drafting, costs.plain.at(rows)
    least = row * rows / max(plain, 1e-9)
    worth: list[tuple[float, int]] = []
    drafts = 0
    for index, probabilities in enumerate(chances):
        drafts += 1
        for probability in probabilities:
            if probability <= least:
                break
            worth.append((probability, index))
    lengths = [0] * drafts
    tokens, seconds = float(rows), costs.drafted.at(rows)
    for probability, index in sorted(worth, reverse=True):
        if probability * seconds <= row * tokens:
            break
        lengths[index] += 1
        tokens += probability
        seconds += row
    if tokens * plain < min_speedup * rows * seconds:
        return [0] * drafts
    return lengths


def trial(chances: Iterable[Iterable[float]], sizes: Many[int], rows: int, costs: Costs) -> list[int]:
    """Return how many tokens of each draft to compute in a step whose only use is to know what that costs; drafts have
    `sizes` tokens. None unless they promise as many tokens as the step has without."""
    if sum(map(sum, chances)) < rows:
        return [0] * len(sizes)
    lengths = list[int]()
    left = int(_TRIAL_STEPS * costs.plain.at(rows) / max(costs.drafted.row, 1e-9))
    for size in sizes:
        lengths.append(min(size, left))
        left -= lengths[-1]
    return lengths
