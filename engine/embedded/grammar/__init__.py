"""Guided decoding: from a guide to token masks, compiled in a process that can be killed."""
