"""The compiled sampler against the reference, at every level: the same tokens for the same seeds, and the same
reports."""

import math
from collections.abc import Sequence
from operator import ne
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.config import EmbeddedConfig
from engine.embedded.grammar.compiler import Matcher
from engine.embedded.models.native import levels
from engine.embedded.models.native.build import library
from engine.embedded.models.native.runner import NativeRunner, NativeSampler
from engine.embedded.sampling.sampler import Sampled, Sampler, uniform
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sampling.truncation import Truncation, quantile, weigh
from engine.types import SamplingParams

CPU = torch.device("cpu")
EOS = (0, 1)
TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_k": 900},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.4},
    {"temperature": 1e-9, "top_p": 0.5},
)


@pytest.fixture
def compiled(level: str) -> Any:
    """Return a compiled sampler for a size of vocabulary."""
    code = library(Path("~/.cache/trellis").expanduser(), levels.chosen(level)[0])
    return lambda vocab: NativeSampler(vocab, code, threads=3)


def rows(count: int, vocab: int) -> torch.Tensor:
    """Logits of several shapes: flat, usual, peaked, and full of ties and masks."""
    logits = torch.randn(count, vocab) * 2
    logits[::4] /= 20
    logits[1::4] += torch.rand(len(logits[1::4]), vocab).pow(100) * 20
    logits[2::4] = logits[2::4].round()
    logits[2::4, : vocab // 3] = -math.inf
    return logits


def states(values: Sequence[dict[str, Any]], vocab: int, seeded: bool = True) -> list[SamplerState]:
    made = []
    for index, value in enumerate(values):
        seed = (index - 5) * 0x123456789ABCDEF
        sampling = SamplingParams(max_tokens=100, **value, seed=seed if seeded else None)
        made.append(SamplerState(sampling, (3, 7), EOS, seed, None, vocab, CPU))
        for token in range(index % 5):
            made[-1].accept(token)
    return made


@pytest.mark.parametrize("vocab", [2, 24, 256, 257, 1000, 5003])
def test_a_seed_draws_the_token_that_the_reference_draws(vocab: int, compiled: Any) -> None:
    torch.manual_seed(vocab)
    batch = states(TRUNCATIONS * 8, vocab)
    logits = rows(len(batch), vocab)
    assert compiled(vocab).sample(logits.clone(), batch) == Sampler(vocab, CPU).sample(logits, batch)


@pytest.mark.parametrize("vocab", [2, 24, 256, 257, 1000, 5003])
def test_draws_without_a_seed_are_at_the_quantile(vocab: int, compiled: Any) -> None:
    """Between those of the reference a little before and behind: sums of float32 are rounded there and here."""
    torch.manual_seed(vocab)
    batch = states(TRUNCATIONS * 8, vocab, seeded=False)
    logits = rows(len(batch), vocab)
    weights = weigh(logits, [Truncation.of(state.sampling) for state in batch])
    quantiles = [uniform(state.seed, state.position) for state in batch]
    first = quantile(weights, [max(0.0, part - 1e-5) for part in quantiles])
    last = quantile(weights, [part + 1e-5 for part in quantiles])
    tokens = torch.tensor([one.token_ids[0] for one in compiled(vocab).sample(logits, batch)])
    assert bool(((first <= tokens) & (tokens <= last)).all())
    assert bool((weights.gather(1, tokens.unsqueeze(1)) > 0).all())


class FirstHalf:
    """Allows ids below 32 of 64."""

    shared = None
    error = ""

    def allows(self, token_id: int) -> bool:
        return token_id < 32

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        bitmask[row, 1] = 0


@pytest.mark.parametrize("values", [{}, {"seed": 3}, {"temperature": 0.0}], ids=str)
def test_tokens_that_a_grammar_refuses_are_drawn_again_as_by_the_reference(
    values: dict[str, Any], compiled: Any
) -> None:
    torch.manual_seed(0)
    logits, matcher, sampling = torch.randn(400, 64), cast(Matcher, FirstHalf()), SamplingParams(max_tokens=9, **values)
    free = [SamplerState(sampling, (3,), EOS, seed, None, 64, CPU) for seed in range(400)]
    guided = [SamplerState(sampling, (3,), EOS, seed, matcher, 64, CPU) for seed in range(400)]
    tokens = [one.token_ids[0] for one in compiled(64).sample(logits.clone(), guided)]
    expected = [one.token_ids[0] for one in Sampler(64, CPU).sample(logits.clone(), guided)]
    unguided = [one.token_ids[0] for one in compiled(64).sample(logits, free)]
    assert sum(map(ne, tokens, expected)) <= 1  # a quantile may lie at a border, where sums are rounded differently
    assert max(tokens) < 32
    assert sum(map(ne, tokens, unguided)) > 100
    assert all(token == first for token, first in zip(tokens, unguided, strict=True) if first < 32)


@pytest.mark.parametrize("top_k", [0, 1500])
def test_a_flat_nucleus_ends_where_the_exact_one_does(top_k: int, compiled: Any) -> None:
    vocab = 4000
    logits = torch.linspace(0, 1, vocab)
    batch = states([{"top_p": 0.9, "top_k": top_k}] * 400, vocab)
    tokens = [one.token_ids[0] for one in compiled(vocab).sample(logits.repeat(400, 1), batch)]
    weights = logits.double().exp().flip(0)[: top_k or vocab]
    lowest = vocab - 1 - int(torch.searchsorted(weights.cumsum(0), 0.9 * weights.sum()))
    assert lowest <= min(tokens) < lowest + (vocab - lowest) // 20
    assert max(tokens) > vocab - vocab // 20


@pytest.mark.parametrize("vocab", [1, 2, 24, 256, 257, 1000, 5003])
def test_greedy_rows_take_the_first_largest_logit(vocab: int, compiled: Any) -> None:
    torch.manual_seed(vocab)
    logits = rows(40, vocab)
    logits[-1] = -math.inf
    for row, place in enumerate((0, vocab // 2, vocab - 1)):
        logits[row, place] = 50
    batch = states([{"temperature": 0.0}] * len(logits), vocab)
    tokens = [one.token_ids[0] for one in compiled(vocab).sample(logits, batch)]
    assert tokens == logits.numpy().argmax(axis=1).tolist()


def test_logits_that_are_all_nan_have_an_id(compiled: Any) -> None:
    (sampled,) = compiled(300).sample(torch.full((1, 300), math.nan), states([{"temperature": 0.0}], 300))
    assert sampled.token_ids == (0,)


def test_extreme_logits_stay_finite(compiled: Any) -> None:
    logits = torch.full((1, 300), -1e30)
    logits[0, 7], logits[0, 8] = 1e30, -math.inf
    for values in ({}, {"temperature": 1e-44, "top_p": 0.5}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 299}):
        for seeded in (False, True):
            assert compiled(300).sample(logits, states([values], 300, seeded))[0].token_ids == (7,)


def test_a_mixed_batch_is_edited_and_reported_as_by_the_reference(compiled: Any) -> None:
    torch.manual_seed(1)
    vocab = 600
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"logprobs": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
        {"logit_bias": {5: 9.0}, "logprobs": 20},
        {"temperature": 0.0, "presence_penalty": 1.5},
        {"allowed_token_ids": (4, 9), "top_p": 0.5, "logprobs": vocab},
        {"min_tokens": 50, "bad_words": ((6,),)},
    ]
    logits = torch.randn(24, vocab) * 2
    batch = states(kinds * 4, vocab)
    same(compiled(vocab).sample(logits.clone(), batch), Sampler(vocab, CPU).sample(logits, batch))


@pytest.mark.parametrize("vocab", [24, 256, 700])
def test_log_probabilities_and_ranks_are_those_of_the_reference(vocab: int, compiled: Any) -> None:
    """Ties, which are listed by id, and masks too; neither fewer nor more than the vocabulary has."""
    torch.manual_seed(vocab)
    logits = rows(16, vocab)
    for count in (0, 1, 20, vocab):
        batch = states([{"logprobs": count, "temperature": index % 2} for index in range(16)], vocab)
        # The reference lists all, so that ties at the end are no accident.
        all_listed = states([{"logprobs": vocab, "temperature": index % 2} for index in range(16)], vocab)
        expected = [
            Sampled(one.token_ids, (one.logprobs[0][: 1 + count],))
            for one in Sampler(vocab, CPU).sample(logits.clone(), all_listed)
        ]
        same(compiled(vocab).sample(logits.clone(), batch), expected)


def same(found: Sequence[Sampled], expected: Sequence[Sampled]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.logprobs) == len(other.logprobs)
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert [(entry.token_id, entry.rank) for entry in ours] == [(e.token_id, e.rank) for e in theirs]
            assert [entry.logprob for entry in ours] == pytest.approx([e.logprob for e in theirs], abs=1e-5)


def test_the_native_runner_brings_it(tiny_model: Path) -> None:
    config = EmbeddedConfig(model=str(tiny_model), num_blocks=8, threads=1, max_seq_len=64, quantization="int8")
    assert isinstance(NativeRunner(config).sampler, NativeSampler)
