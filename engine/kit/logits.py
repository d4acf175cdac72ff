"""Our own logits processors: code that may change the logits of one request before each of its tokens is sampled.

A processor is registered under a name when the server is built, and asked for by that name (`SamplingParams.processors`). Every request
has its own instance, so a processor may keep state. Requests never carry code.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.errors import InvalidRequest


class LogitsProcessor(Protocol):
    """One request's processor. One that raises, or writes NaN, is reported once in the log and has no effect on that token."""

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        """Change `logits` in place: float32 [vocab], after bias, masks and penalties, before temperature; masked ids are -inf and stay
        so whatever is written. `token_ids` are the prompt and the output so far.
        """
        ...


Factory = Callable[[], LogitsProcessor]
"""What makes one for each request. TensorRT-LLM's worker processes get it pickled: a module-level class or function, a `partial` of one,
or a `ProcessorConfig` (`engine/kit/processors.py`)."""
_factories: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Make a processor known in this process, which must be the engine's. Raises ValueError if the name is taken by another factory."""
    if _factories.setdefault(name, factory) != factory:
        raise ValueError(f"a logits processor named {name!r} is registered already")


def unregister(name: str) -> None:
    """Forget a processor; running requests keep theirs."""
    del _factories[name]


def factory(name: str) -> Factory:
    """What makes the processors of a name. Raises InvalidRequest if nothing is registered under it."""
    if name not in _factories:
        raise InvalidRequest(f"no logits processor is named {name[:64]!r}", "processors")
    return _factories[name]


def create(name: str) -> LogitsProcessor:
    """A fresh processor for one request. Raises InvalidRequest if nothing is registered under the name."""
    return factory(name)()
