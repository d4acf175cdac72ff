"""Work that Python's garbage collector must not interrupt."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running. Imports are faster without it, as it would walk the million objects of
    transformers again and again; a CUDA graph must not be captured while it ends older ones."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
