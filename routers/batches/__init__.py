"""Batches of messages: routes, what is stored, and what works through them."""
