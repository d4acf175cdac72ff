"""The choice of a replica: what it would have to compute, weighed against the work that it has already."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from engine.replicas.routing.load import Load

PolicyName = Literal["kv", "round_robin", "least_loaded"]


class Candidate(Protocol):
    """The view that a policy has of a replica."""

    number: int
    load: Load

    @property
    def last_asked(self) -> int:
        """Grows with each choice."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy:
    """Chooses by cost, or in turn.

    `kv`: cost is weight x tokens to compute + the replica's work in tokens. `least_loaded`: the work alone.
    `round_robin`: in turn. Of equal costs the replica with fewer requests wins, then one at random. With a
    `temperature` above 0 costs become probabilities.
    """

    def __init__(
        self, name: PolicyName, overlap_weight: float = 1.0, temperature: float = 0.0, seed: int | None = None
    ) -> None:
        self.name = name
        self._weight = overlap_weight
        self._temperature = temperature
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[C], prompt: int, overlaps: Mapping[int, int]) -> C:
        """Return one of the candidates. `overlaps` says how many of the `prompt` tokens each replica has, by number."""
        if self.name == "round_robin":
            return min(candidates, key=lambda candidate: (candidate.last_asked, candidate.number))
        costs = [self._cost(candidate, prompt, overlaps) for candidate in candidates]
        if self._temperature:
            return self._sampled(candidates, costs)
        ranks = [(cost, candidate.load.requests) for cost, candidate in zip(costs, candidates, strict=True)]
        least = min(ranks)
        equals = [candidate for rank, candidate in zip(ranks, candidates, strict=True) if rank == least]
        return equals[0] if len(equals) == 1 else self._random.choice(equals)

    def _cost(self, candidate: Candidate, prompt: int, overlaps: Mapping[int, int]) -> float:
        if self.name == "least_loaded":
            return candidate.load.tokens
        return self._weight * (prompt - overlaps.get(candidate.number, 0)) + candidate.load.tokens

    def _sampled(self, candidates: Sequence[C], costs: Sequence[float]) -> C:
        """Costs are taken relative to their span, so that a temperature means the same for short and long prompts."""
        least = min(costs)
        span = max(costs) - least or 1.0
        weights = [math.exp(-(cost - least) / span / self._temperature) for cost in costs]
        return self._random.choices(candidates, weights)[0]
