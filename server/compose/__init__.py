"""Composition of a replica from settings."""
