"""Batches of messages: routes, store and worker."""
