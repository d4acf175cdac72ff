"""Logits processors: the registry, and the effects of a processor on its request."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from engine.embedded.sampling.sampler import Sampler
from engine.embedded.sampling.state import SamplerState
from engine.errors import InvalidRequest
from engine.kit.logits import create, register, unregister
from engine.types import SamplingParams

VOCAB = 8
CPU = torch.device("cpu")


class Forced:
    """Emits 5, 6, 7, ... whatever the model says, counting its own calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        self.calls.append(tuple(token_ids))
        logits[:] = 0
        logits[4 + len(self.calls)] = 100


class Broken:
    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        logits[:] = 0
        raise KeyError("broken")


class NotANumber:
    def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
        logits[3] = float("nan")


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    factories = {"forced": Forced, "broken": Broken, "nan": NotANumber}
    for name, factory in factories.items():
        register(name, factory)
    yield
    for name in factories:
        unregister(name)


def state(*names: str, **params: Any) -> SamplerState:
    sampling = SamplingParams(max_tokens=9, temperature=0, processors=names, **params)
    return SamplerState(sampling, [1, 2], (0,), 0, None, VOCAB, CPU)


def step(*states: SamplerState) -> list[int]:
    logits = torch.arange(VOCAB).float().repeat(len(states), 1)
    tokens = [token for sampled in Sampler(VOCAB, CPU).sample(logits, states) for token in sampled.token_ids]
    for one, token in zip(states, tokens, strict=True):
        one.accept(token)
    return tokens


def test_a_name_belongs_to_one_factory() -> None:
    register("forced", Forced)
    with pytest.raises(ValueError, match="'forced' is registered already"):
        register("forced", Broken)


def test_an_unknown_name_is_the_users_mistake() -> None:
    with pytest.raises(InvalidRequest, match="no logits processor is named 'nothing'") as caught:
        create("nothing")
    assert caught.value.param == "processors"


def test_each_request_has_its_own_instance_and_sees_prompt_and_output() -> None:
    first, second = state("forced"), state("forced")
    assert step(first) == [5]
    assert step(first, second, state()) == [6, 5, 7]
    processor = first.processors[0]
    assert isinstance(processor, Forced)
    assert processor.calls == [(1, 2), (1, 2, 5)]


def test_processors_run_in_order() -> None:
    class Reverse:
        def __call__(self, token_ids: Sequence[int], logits: Any) -> None:
            logits.copy_(logits.flip(0))

    register("reverse", Reverse)
    try:
        assert step(state("forced", "reverse"), state("reverse", "forced")) == [VOCAB - 1 - 5, 5]
    finally:
        unregister("reverse")


@pytest.mark.parametrize("name", ["broken", "nan"])
def test_a_failing_processor_is_logged_once_and_has_no_effect(name: str, caplog: pytest.LogCaptureFixture) -> None:
    failing = state(name)
    with caplog.at_level(logging.ERROR):
        assert step(failing) == step(failing) == [VOCAB - 1]
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None


def test_a_processor_cannot_lift_a_mask() -> None:
    assert step(state("forced", bad_words=((5,),), allowed_token_ids=(3, 4, 5))) == [3]
    assert step(state("forced", min_tokens=1, stop_token_ids=(5,))) != [5]
