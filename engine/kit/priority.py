"""The order in which requests are served, both in the admission queue and in the engine."""

PRIORITY_SECONDS = 10.0
"""Seconds of arrival time that one unit of priority is worth, so that a low-priority request waits longer, but not for
ever."""


def rank(priority: int, arrival: float) -> float:
    """Return a sort key, smallest first: the arrival in seconds, shifted by the priority (lower is more urgent)."""
    return arrival + priority * PRIORITY_SECONDS
