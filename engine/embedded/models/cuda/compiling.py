"""A warning for each kernel that Triton compiles while a request waits for it."""

# mypy: ignore-errors

import logging

import triton

log = logging.getLogger(__name__)


def expect_compilation() -> None:
    """Let kernels be compiled without a warning: no request waits for a start."""
    triton.knobs.runtime.jit_post_compile_hook = None


def warn_of_compilation() -> None:
    """Log a warning for each kernel that is compiled from now on, with what it is compiled for."""
    triton.knobs.runtime.jit_post_compile_hook = _warn


def _warn(*, key, fn, **_) -> None:
    log.warning("a request waited for kernel %s to be compiled for %s", fn.name, key)
