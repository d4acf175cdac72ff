"""Sampling of tokens from logits: penalties, truncation, seeds and log-probabilities."""
