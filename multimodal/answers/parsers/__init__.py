"""Parsers of tool calls and reasoning: one engine, and a description of each family's format."""
