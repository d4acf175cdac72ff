"""Conversion of an audio file into the segments of its transcript."""
