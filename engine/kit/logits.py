"""Registry of logits processors: code that may change the logits of one request before each of its tokens is sampled.

A processor is registered under a name at startup and requested by that name (`SamplingParams.processors`). Every
request has its own instance, so a processor may keep state. Requests never carry code.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.errors import InvalidRequest


class LogitsProcessor(Protocol):
    """One request's processor. If it raises or writes NaN, this is logged once, and it has no effect on that token."""

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        """Change `logits` in place: float32 [vocab], after bias, masks and penalties, before temperature.

        Masked ids are -inf and stay masked even if they are overwritten. `token_ids` are the prompt and the output so
        far.
        """
        ...


Factory = Callable[[], LogitsProcessor]
"""Creates a processor for each request. TensorRT-LLM pickles it for its workers, so it must be a module-level class or
function, a `partial` of one, or a `ProcessorConfig` (`engine/kit/processors.py`)."""
_factories: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Register a processor in this process, which must be the engine's.

    Raises ValueError if another factory has the name.
    """
    if _factories.setdefault(name, factory) != factory:
        raise ValueError(f"a logits processor named {name!r} is registered already")


def unregister(name: str) -> None:
    """Remove a processor; running requests keep their instances."""
    del _factories[name]


def factory(name: str) -> Factory:
    """Return the factory registered under a name. Raises InvalidRequest if there is none."""
    if name not in _factories:
        raise InvalidRequest(f"no logits processor is named {name[:64]!r}", "processors")
    return _factories[name]


def create(name: str) -> LogitsProcessor:
    """Create a processor for one request. Raises InvalidRequest if none is registered under the name."""
    return factory(name)()
