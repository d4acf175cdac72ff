"""Standard input and output of a child process, kept from its own children.

A grandchild that inherits them and outlives the child would keep the parent's pipes open, and the parent would not see
the end.
"""

import os
from typing import NamedTuple, TextIO

_MOST_INHERITED = 256


class Channel(NamedTuple):
    """The pipes between a child and its parent."""

    input: int
    """File descriptor of the former standard input."""
    output: TextIO
    """The former standard output."""


def take() -> Channel:
    """Take over both pipes. Standard input is then empty, and standard output goes to standard error.

    Call this before any file is opened: descriptors above 2 are closed, because uvloop leaves its children copies of
    the pipes.
    """
    os.closerange(3, _MOST_INHERITED)
    channel = Channel(os.dup(0), os.fdopen(os.dup(1), "w"))  # not inherited by children
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return channel
