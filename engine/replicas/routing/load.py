"""Load of the replicas, as far as the router knows it: the work that the router gave them."""

from dataclasses import dataclass

DECODING_SHARE = 1 / 8
"""Weight of a token in a running request's KV cache, which each step reads, beside a token still to be computed."""
UNKNOWN_TOKENS = 256
"""Assumed length of a prompt that the router has not tokenised."""


@dataclass(slots=True)
class Load:
    """The work of one replica."""

    requests: int = 0
    prefilling: int = 0
    """Prompt tokens to be computed, of requests that have not been answered."""
    held: int = 0
    """Prompt tokens of all its requests."""

    @property
    def tokens(self) -> float:
        """Its work, in tokens to compute."""
        return self.prefilling + self.held * DECODING_SHARE


class Assignment:
    """The work of one request at a replica, until `end`; less from `answered` on, when its first byte has come."""

    __slots__ = ("_ended", "_load", "_prefilling", "_prompt")

    def __init__(self, load: Load, prompt: int, overlap: int) -> None:
        """`overlap` of the `prompt` tokens need not be computed."""
        self._load = load
        self._prompt = prompt
        self._prefilling = prompt - overlap
        self._ended = False
        load.requests += 1
        load.prefilling += self._prefilling
        load.held += prompt

    def answered(self) -> None:
        self._load.prefilling -= self._prefilling
        self._prefilling = 0

    def end(self) -> None:
        """Idempotent."""
        if not self._ended:
            self._ended = True
            self.answered()
            self._load.requests -= 1
            self._load.held -= self._prompt
