"""Our logits processor in TensorRT-LLM edits logits as the embedded engine does."""

import pickle
from typing import Any

import pytest
import torch

from engine.embedded.sampling.penalties import edit
from engine.embedded.sampling.sampler import Sampler
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sampling.truncation import Truncation, weigh
from engine.trtllm.processors import ProcessorAdapter
from engine.trtllm.sampling import MASKED
from engine.trtllm.support import Edits, Support
from engine.types import ReasoningBudget, SamplingParams
from tests.support.trtllm import registered

VOCABULARY, EOS, PROMPT = 96, (2, 7), (5, 6, 7, 8, 9)
CPU = torch.device("cpu")
ON_1_2_1 = Support({"disable_overlap_scheduler": True}, processors=True)

CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "logit_bias": {5: 3.0, 11: -2.0}},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.9, "min_tokens": 3},
    {"bad_words": ((4,), (11, 12), (13, 11, 12), (9, 11))},
    {"min_tokens": 2, "stop_token_ids": (15,), "allowed_token_ids": (2, 3, 7, 15, 16, 17)},
    {"min_tokens": 4, "stop_token_ids": (15,), "ignore_eos": True},
    {"min_tokens": 4, "allowed_token_ids": (2, 7)},
    {"processors": ("odd", "fails")},
    {"reasoning_budget": ReasoningBudget(2, (9, 11), (13,), True, {1: {9: 0}}), "bad_words": ((4,),)},
    {"processors": ("odd",), "repetition_penalty": 1.3, "bad_words": ((4,),), "logit_bias": {9: 1.0}},
]
DRAWS: list[dict[str, Any]] = [
    {"seed": 3, "temperature": 0.8, "top_p": 0.7},
    {"seed": -5, "temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"seed": 1 << 62, "temperature": 0.3, "min_tokens": 3, "processors": ("odd",)},
]


class Odd:
    """Favours a token that depends on how often it was called before."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, token_ids: Any, logits: torch.Tensor) -> None:
        logits[(3 + 2 * self.calls + len(token_ids)) % VOCABULARY] += 2.5
        self.calls += 1


class Fails:
    def __call__(self, token_ids: Any, logits: torch.Tensor) -> None:
        logits[0] = torch.nan


def adapter(sampling: SamplingParams, num_prompt: int | None = len(PROMPT), **factories: Any) -> ProcessorAdapter:
    """As a worker gets it."""
    _, edits = ON_1_2_1.split(sampling, EOS, num_prompt)
    made = ProcessorAdapter(
        [factories[name] for name in sampling.processors], edits or Edits(sampling, EOS, num_prompt)
    )
    copied: ProcessorAdapter = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
    return copied


def called(processor: ProcessorAdapter, token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    rows = logits.clone().view(1, 1, -1)
    processor(7, rows, [token_ids], None, None)
    return rows.view(-1)


def state_of(sampling: SamplingParams) -> SamplerState:
    return SamplerState(sampling, PROMPT, EOS, sampling.seed or 0, None, VOCABULARY, CPU)


@pytest.mark.parametrize("fields", CASES)
@pytest.mark.parametrize("chunks", [1, 3])
def test_edited_logits_are_those_of_the_embedded_engine(fields: dict[str, Any], chunks: int) -> None:
    """At each step, and whatever was done for the chunks of a prompt before the last."""
    generator = torch.Generator().manual_seed(1)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, **fields)
    with registered(odd=Odd, fails=Fails):
        state, processor = state_of(sampling), adapter(sampling, odd=Odd, fails=Fails)
        for _ in range(chunks - 1):
            called(processor, list(PROMPT), torch.randn(VOCABULARY, generator=generator))
        for token in (11, 12, 9, 11, 13, 11, 5):
            logits = 3 * torch.randn(VOCABULARY, generator=generator)
            expected = logits.clone().unsqueeze(0)
            edit(expected, [state])
            torch.testing.assert_close(
                called(processor, list(state.tokens), logits), expected[0].clamp(min=MASKED), rtol=0, atol=0
            )
            state.accept(token)


@pytest.mark.parametrize("fields", DRAWS)
def test_a_seed_draws_the_token_that_the_embedded_engine_draws(fields: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    sampling, sampler = SamplingParams(max_tokens=99, **fields), Sampler(VOCABULARY, CPU)
    with registered(odd=Odd):
        state, processor = state_of(sampling), adapter(sampling, odd=Odd)
        drawn = []
        for _ in range(40):
            logits = 3 * torch.randn(VOCABULARY, generator=generator)
            (sampled,) = sampler.sample(logits.clone().unsqueeze(0), [state])
            edited = called(processor, list(state.tokens), logits)
            assert edited.softmax(0).max() == 1, "no other token can be drawn, at any temperature"
            drawn.append(int(edited.argmax()))
            assert (drawn[-1],) == sampled.token_ids
            state.accept(drawn[-1])
    assert len(set(drawn)) > 5


@pytest.mark.parametrize("truncation", [{"min_p": 0.1}, {"min_p": 0.02, "top_p": 0.8, "top_k": 30}])
def test_min_p_leaves_the_distribution_of_the_embedded_engine(truncation: dict[str, Any]) -> None:
    """The engine draws from it by the temperature, which is all that is left to it."""
    sampling = SamplingParams(max_tokens=9, temperature=0.7, **truncation)
    native, edits = ON_1_2_1.split(sampling, EOS, len(PROMPT))
    assert edits is not None and (native.temperature, native.top_p, native.top_k, native.min_p) == (0.7, 1.0, 0, 0.0)
    logits = 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))
    found = (called(adapter(sampling), list(PROMPT), logits) / native.temperature).softmax(0)
    weights = weigh(logits.unsqueeze(0), [Truncation.of(sampling)])[0]
    torch.testing.assert_close(found, weights / weights.sum())
    assert 1 < int((weights > 0).sum()) < VOCABULARY


def test_after_a_handoff_processors_have_been_called_for_the_first_token() -> None:
    """They may keep state, and a decode replica's first call has that token already."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0, processors=("odd",))
    logits = torch.zeros(VOCABULARY)
    whole, decode = adapter(sampling, odd=Odd), adapter(sampling, odd=Odd)
    called(whole, list(PROMPT), logits)
    assert called(decode, [*PROMPT, 11], logits).equal(called(whole, [*PROMPT, 11], logits))


class Raises:
    def __call__(self, token_ids: Any, logits: torch.Tensor) -> None:
        raise RuntimeError("no")


class CannotBeMade:
    def __init__(self) -> None:
        raise RuntimeError("no")

    def __call__(self, token_ids: Any, logits: torch.Tensor) -> None: ...


@pytest.mark.parametrize("broken", [Raises, CannotBeMade])
def test_a_processor_that_fails_takes_nothing_else_with_it(broken: type) -> None:
    """Neither the other processors, nor penalties and bias; also on a decode replica."""
    fields: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0, "logit_bias": {9: 1.0}, "presence_penalty": 1.0}
    sound = adapter(SamplingParams(**fields, processors=("odd",)), odd=Odd)
    failing = adapter(SamplingParams(**fields, processors=("broken", "odd")), odd=Odd, broken=broken)
    for tokens in ([*PROMPT, 11], [*PROMPT, 11, 12]):
        logits = torch.zeros(VOCABULARY)
        edited = called(sound, tokens, logits)
        assert edited[9] == 1 and called(failing, tokens, logits).equal(edited)


def test_a_prompt_of_unknown_length_is_that_of_the_first_call() -> None:
    """The engine makes tokens of text and images."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1.0, min_tokens=1)
    processor, logits = adapter(sampling, num_prompt=None), torch.zeros(VOCABULARY)
    first, second = (called(processor, tokens, logits) for tokens in ([*PROMPT], [*PROMPT, 11]))
    assert [index for index, value in enumerate(first.tolist()) if value] == [2, 7], "min_tokens mask all ends"
    assert {index: value for index, value in enumerate(second.tolist()) if value} == {11: -1.0}


def test_beside_a_guide_masks_can_be_overruled() -> None:
    """The engine adds the guide's mask after this: where it allows what is masked here alone, it decides."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0, bad_words=((4,), (5,)))
    edited = called(adapter(sampling), list(PROMPT), torch.zeros(VOCABULARY))
    guided = torch.full((VOCABULARY,), -torch.inf)
    guided[[4, 5]] = edited[[4, 5]]
    assert guided.softmax(0)[[4, 5]].tolist() == [0.5, 0.5]


def test_half_precision_stays_masked() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, bad_words=((4,),))
    rows = torch.ones(1, 1, VOCABULARY, dtype=torch.float16)
    adapter(sampling)(7, rows, [list(PROMPT)], None, None)
    assert rows.view(-1).softmax(0)[4] == 0 and not rows.isnan().any()
