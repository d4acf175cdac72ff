"""How busy the replicas are, as far as the router that gave them their work knows."""

from dataclasses import dataclass

DECODING_SHARE = 1 / 8
"""Weight of a token in the KV cache of a running request, which each step reads, beside a token that is still to be computed."""
UNKNOWN_TOKENS = 256
"""Assumed length of a prompt that the router has not tokenised."""


@dataclass(slots=True)
class Load:
    """The work of one replica."""

    requests: int = 0
    prefilling: int = 0
    """Prompt tokens that it was asked to compute, of requests of which nothing has come yet."""
    held: int = 0
    """Prompt tokens of all its requests."""

    @property
    def tokens(self) -> float:
        """Its work, in tokens to compute."""
        return self.prefilling + self.held * DECODING_SHARE


class Assignment:
    """One request at a replica, from `begin` to `end`; `answered` in between, once its first byte has come."""

    __slots__ = ("_ended", "_load", "_prefilling", "_prompt")

    def __init__(self, load: Load, prompt: int, overlap: int) -> None:
        """`overlap`: how many of the `prompt` tokens need not be computed."""
        self._load, self._prompt, self._prefilling = load, prompt, prompt - overlap
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
