"""A small EAGLE-3 head for SmolLM2-135M-Instruct, and what trained it."""
