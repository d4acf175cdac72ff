"""Stop strings, which may span tokens and chunks."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on up to the first stop string, and holds back what may still become one.

    Of several matches the one that ends first wins, the longest if they end together.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return text to send now, and the stop string if one is complete: everything after it is dropped."""
        buffer = self._held + text
        found = [
            (start + len(stop), index, stop)
            for index, stop in enumerate(self._stops)
            if (start := buffer.find(stop)) >= 0
        ]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return buffer[:end] if self._include else buffer[: end - len(stop)], stop
        keep = self._partial(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return what is held back. Nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _partial(self, buffer: str) -> int:
        """Return the length of the longest suffix of `buffer` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stops):
                return length
        return 0
