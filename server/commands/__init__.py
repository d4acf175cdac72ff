"""Commands beside `serve`: clients of a running server, and the list of models."""
