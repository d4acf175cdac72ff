"""From logits to sampled tokens: penalties, truncation, seeds and log-probabilities."""
