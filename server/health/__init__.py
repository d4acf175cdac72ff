"""Readiness, the canary request and the event-loop watchdog."""
