"""Sample logits processors, and their configuration.

The engine's configuration lists them, so that every restart registers them again.

They use no tensor library: they call only methods that torch tensors have on every device.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.kit.logits import LogitsProcessor, register


class ForcedSequence:
    """Forces the output `token_ids`, then `eos_token_id`. Ids beyond the vocabulary raise IndexError.

    The position follows from the number of tokens since the first call.
    """

    def __init__(self, token_ids: Sequence[int], eos_token_id: int) -> None:
        self._forced = tuple(token_ids)
        self._eos_token_id = eos_token_id
        self._num_prompt: int | None = None

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        if self._num_prompt is None:
            self._num_prompt = len(token_ids)
        position = len(token_ids) - self._num_prompt
        forced = self._forced[position] if position < len(self._forced) else self._eos_token_id
        logits.fill_(-math.inf)
        logits[forced] = 0.0


class HelloWorld(ForcedSequence):
    """Forces the answer `TEXT`. `token_ids` are the tokens of the text in the model's vocabulary."""

    TEXT = "Hello world!"


class Temperature:
    """Divides the logits by `temperature`, in addition to the request's own temperature.

    Raises ValueError unless it is above 0.
    """

    def __init__(self, temperature: float) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"a temperature must be above 0 and finite, not {temperature}")
        self._temperature = temperature

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        logits.div_(self._temperature)


class ProcessorConfig(msgspec.Struct, frozen=True):
    """A factory that is registered under `name`, as data. `arguments` are those of the constructor."""

    name: str
    kind: Literal["forced_sequence", "hello_world", "temperature"]
    arguments: dict[str, Any]

    def __call__(self) -> LogitsProcessor:
        return _CLASSES[self.kind](**self.arguments)


_CLASSES: dict[str, type[ForcedSequence] | type[Temperature]] = {
    "forced_sequence": ForcedSequence,
    "hello_world": HelloWorld,
    "temperature": Temperature,
}


def register_all(configs: Sequence[ProcessorConfig]) -> None:
    """Register processors in this process.

    Raises ValueError if a name is taken, TypeError or ValueError for wrong arguments.
    """
    for config in configs:
        config()
        register(config.name, config)
