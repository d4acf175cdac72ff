"""Standard input and output of a child process, kept from its own children: one that outlives it would hold the parent's pipes open,
and the parent would not see the end.
"""

import os
from typing import NamedTuple, TextIO

_MOST_INHERITED = 256


class Channel(NamedTuple):
    """Of a child with its parent."""

    input: int
    """What was standard input, a file descriptor."""
    output: TextIO
    """What was standard output."""


def take() -> Channel:
    """Keep both for this process; others read nothing, and what libraries print goes to standard error. To be called before any file is
    opened: descriptors besides the three are closed, since uvloop leaves its children copies of the pipes.
    """
    os.closerange(3, _MOST_INHERITED)
    channel = Channel(os.dup(0), os.fdopen(os.dup(1), "w"))  # which no child inherits
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return channel
