"""Conversion of deltas into answers: text, stop strings, log-probabilities and response chunks."""
