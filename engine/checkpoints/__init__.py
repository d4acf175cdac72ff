"""Resolving a model setting to a checkpoint folder, and reading the facts of the model in it."""
