"""Routing: which replica has which KV blocks, and which one a request goes to."""
