"""Weights that the replicas of a host share: a service owns the memory, engines map it read-only."""
