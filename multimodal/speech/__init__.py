"""From an audio file to the segments of its transcript."""
