"""Sample logits processors, and how any of them gets to where the engine runs: its configuration lists them, so that they are registered
again whenever the engine's process is restarted.

None of them knows a tensor library: what they call on `logits` is what torch tensors of every device have.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.kit.logits import LogitsProcessor, register


class ForcedSequence:
    """Emits `token_ids` one after the other and then `eos_token_id`, whatever the model says. Ids beyond the vocabulary are IndexErrors.

    Where it stands follows from how many tokens have come since the first call.
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
    """Answers `TEXT` and ends. `token_ids` are those of the text in the model's vocabulary."""

    TEXT = "Hello world!"


class Temperature:
    """Divides the logits by `temperature`, besides what the request's own temperature does. Raises ValueError unless it is above 0."""

    def __init__(self, temperature: float) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"a temperature must be above 0 and finite, not {temperature}")
        self._temperature = temperature

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        logits.div_(self._temperature)


class ProcessorConfig(msgspec.Struct, frozen=True):
    """One of these as a value: the factory that is registered under `name`. `arguments` are the constructor's."""

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
    """Make them known to the engine of this process. Raises ValueError if a name is taken, TypeError or ValueError for wrong arguments."""
    for config in configs:
        config()
        register(config.name, config)
