"""From deltas to answers: text, stop strings, log-probabilities and response chunks."""
