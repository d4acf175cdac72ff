"""The order in which requests are served, both in the admission queue and in the engine."""

PRIORITY_SECONDS = 10.0
"""Seconds of arrival time that one unit of priority is worth, so that a low-priority request waits longer, but not for
ever."""
SIBLING_SECONDS = 1.0
"""Seconds of arrival time by which each sequence of a client's request ranks after the one before, so that a request
with many choices does not make all others wait for all of them."""


def rank(priority: int, arrival: float) -> float:
    """Return a sort key, smallest first: the arrival in seconds, shifted by the priority (lower is more urgent)."""
    return arrival + priority * PRIORITY_SECONDS
