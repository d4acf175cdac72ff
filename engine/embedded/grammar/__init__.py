"""Guided decoding: guides become token masks; grammars are compiled in a process that can be killed."""
