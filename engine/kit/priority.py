"""The order in which requests are served, in the queue and in the engine alike."""

PRIORITY_SECONDS = 10.0
"""What one step of priority is worth. A request of lower priority therefore waits longer, but never for ever."""


def rank(priority: int, arrival: float) -> float:
    """Sort key, smaller first: the arrival in seconds, moved back or forth by the priority (lower is more urgent)."""
    return arrival + priority * PRIORITY_SECONDS
