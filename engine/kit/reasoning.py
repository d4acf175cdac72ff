"""The budget of reasoning, token by token: which tokens an engine must force or avoid to end reasoning."""

from engine.types import ReasoningBudget


class ReasoningProgress:
    """The remaining budget of one output. Call `accept` with each of its tokens."""

    def __init__(self, budget: ReasoningBudget) -> None:
        self._budget = budget
        self._state = int(budget.inside)
        self._left = budget.tokens
        self._closed = 0  # tokens of `close` that were forced just now
        self.avoided: tuple[int, ...] = ()
        """Ids that must not come next."""

    @property
    def inside(self) -> bool:
        """Whether the next token is inside reasoning."""
        return self._state % 2 == 1

    @property
    def forced(self) -> int | None:
        """The id that must come next; None if any may."""
        if self._closed or (self.inside and self._left <= 0):
            return self._budget.close[self._closed]
        return None

    def accept(self, token_id: int) -> None:
        """Note the next token. If it differs from the forced one, because a guide required another, nothing more is
        forced."""
        close, forced = self._budget.close, self.forced
        self.avoided = ()
        inside, self._state = self.inside, self._next(token_id)
        if inside and self.inside and forced is None:  # what ends reasoning is none
            self._left -= 1
        if token_id != forced:
            self._closed = 0
        elif self._closed + 1 < len(close):
            self._closed += 1
        else:
            self._closed = self._state = 0
            self.avoided = self._budget.avoid

    def _next(self, token_id: int) -> int:
        steps, start = self._budget.steps, self._state % 2
        for state in (self._state, start):
            if (found := steps.get(state, {}).get(token_id)) is not None:
                return found
        return start
