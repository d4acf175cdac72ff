"""The sampler against a slow reference, against the exact distribution, and in different batches."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.embedded.sampling.penalties import penalised
from engine.embedded.sampling.sampler import Sampled, Sampler, prompt_logprobs, uniform
from engine.embedded.sampling.state import SamplerState
from engine.types import SamplingParams, TokenLogprobs

VOCAB = 24
EOS = (0, 1)
CPU = torch.device("cpu")
NEVER = -math.inf


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **values})


def state(
    sampling: SamplingParams,
    prompt: Sequence[int] = (3,),
    output: Sequence[int] = (),
    seed: int = 0,
    vocab: int = VOCAB,
) -> SamplerState:
    made = SamplerState(sampling, prompt, EOS, seed, None, vocab, CPU)
    for token in output:
        made.accept(token)
    return made


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled]:
    return Sampler(logits.shape[1], CPU).sample(logits.clone(), states)


# The twin: plain Python over lists of floats.


def edited(logits: list[float], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    values = [value + sampling.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in range(len(values)):
        if token in prompt or token in output:
            values[token] = (
                values[token] / sampling.repetition_penalty
                if values[token] > 0
                else values[token] * sampling.repetition_penalty
            )
        count = list(output).count(token)
        values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        banned = any(
            words[-1] == token and tuple(output)[len(output) - len(words) + 1 :] == words[:-1]
            for words in sampling.bad_words
        )
        banned |= bool(sampling.allowed_token_ids) and token not in sampling.allowed_token_ids
        ends = sampling.stop_token_ids + (() if sampling.ignore_eos else EOS)
        banned |= len(output) < sampling.min_tokens and token in ends
        if banned:
            values[token] = NEVER
    if max(values) == NEVER:
        values = [0.0 if token in EOS else NEVER for token in range(len(values))]
    return values


def distribution(values: list[float], sampling: SamplingParams) -> list[float]:
    best = max(values)
    weights = [math.exp((value - best) / sampling.temperature) for value in values]
    if sampling.top_k:
        kth = sorted(values, reverse=True)[min(sampling.top_k, len(values)) - 1]
        weights = [weight if value >= kth else 0.0 for weight, value in zip(weights, values, strict=True)]
    mass, kept, goal = 0.0, NEVER, sampling.top_p * sum(weights)
    for weight in sorted(weights, reverse=True):
        if mass >= goal and weight != kept:
            break
        mass, kept = mass + weight, weight
    if sampling.top_p < 1:
        weights = [weight if weight >= kept else 0.0 for weight in weights]
    weights = [weight if weight >= sampling.min_p else 0.0 for weight in weights]
    return [weight / sum(weights) for weight in weights]


def expected(
    logits: list[float], sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int
) -> set[int]:
    """The token, or the two tokens between which rounding may decide."""
    values = edited(logits, sampling, prompt, output)
    if sampling.temperature == 0 or sampling.top_k == 1:
        return {values.index(max(values))}
    draw, total, near = uniform(seed, len(output)), 0.0, set()
    for token, share in enumerate(distribution(values, sampling)):
        if share and total - 1e-4 <= draw <= total + share + 1e-4:
            near.add(token)
        total += share
    return near


tokens = st.integers(0, VOCAB - 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], SamplingParams, list[int], list[int], int]:
    # Distinct multiples of 1/8, so that no sum of float32 and float64 can disagree on an order.
    logits = [value / 8 for value in draw(st.permutations(range(-VOCAB // 2, VOCAB - VOCAB // 2)))]
    sampling = params(
        temperature=draw(st.sampled_from([0.0, 0.25, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, VOCAB, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.91, 0.503, 0.017])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.37])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.53, -1.01])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.57, -0.51])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.03, 2.07, 100.0]), max_size=3)),
        allowed_token_ids=tuple(draw(st.sets(tokens, max_size=5))),
        bad_words=tuple(tuple(words) for words in draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3))),
        min_tokens=draw(st.integers(0, 4)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.sets(tokens, max_size=2))),
    )
    return (
        logits,
        sampling,
        draw(st.lists(tokens, min_size=1, max_size=5)),
        draw(st.lists(tokens, max_size=5)),
        draw(st.integers(0, 2**63)),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=4))
def test_every_parameter_agrees_with_the_twin(
    batch: list[tuple[list[float], SamplingParams, list[int], list[int], int]],
) -> None:
    states = [state(sampling, prompt, output, seed) for _, sampling, prompt, output, seed in batch]
    sampled = sample(torch.tensor([logits for logits, *_ in batch]), states)
    for one, case in zip(sampled, batch, strict=True):
        assert one.token_ids[0] in expected(*case)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("seeded", [False, True])
def test_draws_follow_the_exact_distribution(values: dict[str, Any], seeded: bool) -> None:
    torch.manual_seed(1)
    logits, sampling, draws = torch.randn(10) * 1.5, params(**values), 2_000 if seeded else 6_000
    exact = distribution(logits.double().tolist(), sampling)
    states = [state(params(**values, seed=seed) if seeded else sampling, seed=seed, vocab=10) for seed in range(draws)]
    counts = [0] * 10
    for one in sample(logits.repeat(draws, 1), states):
        counts[one.token_ids[0]] += 1
    assert all(count == 0 for count, share in zip(counts, exact, strict=True) if share == 0)
    chi_square = sum(
        (count - share * draws) ** 2 / (share * draws) for count, share in zip(counts, exact, strict=True) if share
    )
    assert chi_square < 27.9  # the 99.9th percentile for 9 degrees of freedom, and more for fewer


def test_a_seed_gives_the_same_tokens_although_logits_are_rounded_differently() -> None:
    """Even in the flattest distribution: the products behind logits round differently in batches of different sizes."""
    torch.manual_seed(3)
    logits = torch.randn(200, 20_000)
    states = [state(params(seed=seed), seed=seed, vocab=20_000) for seed in range(200)]
    noise = 1 + torch.randn_like(logits) * 1e-6
    assert sample(logits.clone(), states) == sample(logits * noise, states)


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    values = [uniform(seed, position) for seed in range(-100, 100) for position in range(100)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    counts = [0] * 20
    for value in values:
        counts[int(value * 20)] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 43.8  # the 99.9th percentile for 19 degrees of freedom
    assert uniform(7, 3) == 0.32541466495141846  # pinned: the same on every machine and in every release


@pytest.mark.parametrize("repetition", [1.0, 1.1, 0.7])
@pytest.mark.parametrize("frequency", [0.0, 0.3, -1.7])
@pytest.mark.parametrize("presence", [0.0, 0.9])
def test_penalties_are_the_same_by_numpy_and_by_torch(repetition: float, frequency: float, presence: float) -> None:
    asked = params(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    logits, counts = torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.arange(1000.0) % 4
    by_torch = penalised(logits, counts, asked, torch.where, torch.tensor)
    by_numpy = penalised(logits.numpy(), counts.numpy(), asked, np.where, np.float32)
    assert by_numpy.dtype == np.float32
    assert torch.equal(by_torch, torch.from_numpy(by_numpy))
    assert torch.equal(by_torch, logits) == (asked == params())


@pytest.mark.parametrize(
    "values", [{}, {"top_p": 0.9}, {"top_k": 40}, {"repetition_penalty": 1.3}, {"top_p": 0.95, "logprobs": 3}], ids=str
)
def test_the_batch_changes_nothing(values: dict[str, Any]) -> None:
    torch.manual_seed(2)
    vocab = 1000
    others = [
        params(temperature=0),
        params(),
        params(top_p=0.5),
        params(top_k=900, min_tokens=2),
        params(temperature=0.1, logit_bias={5: 9.0}),
    ]
    logits = torch.randn(6, vocab) * 3
    alone = state(params(**values), seed=11, vocab=vocab)
    company = state(params(**values), seed=11, vocab=vocab)
    for position in range(20):
        row = logits[position % 6 : position % 6 + 1]
        by_itself = sample(row, [alone])[0]
        friends = [state(sampling, seed=position, vocab=vocab) for sampling in others]
        place = position % 6
        rows = torch.cat([torch.randn(place, vocab), row, torch.randn(5 - place, vocab)])
        together = sample(rows, [*friends[:place], company, *friends[place:]])[place]
        assert by_itself == together
        alone.accept(by_itself.token_ids[0])
        company.accept(together.token_ids[0])
    assert alone.tokens == company.tokens


@pytest.mark.parametrize("top_k", [0, 1500])
def test_a_flat_distribution_needs_more_than_the_first_look(top_k: int) -> None:
    vocab, sampling = 4000, params(top_p=0.9, top_k=top_k)
    logits = torch.linspace(0, 1, vocab)
    exact = distribution(logits.double().tolist(), sampling)
    states = [state(sampling, seed=seed, vocab=vocab) for seed in range(400)] + [
        state(params(top_p=0.001), vocab=vocab)
    ]
    seen = [one.token_ids[0] for one in sample(logits.repeat(len(states), 1), states)]
    lowest = next(token for token, share in enumerate(exact) if share)
    assert lowest - 5 <= min(seen) < lowest + (vocab - lowest) // 20
    assert max(seen) > vocab - vocab // 20


def test_greedy_takes_the_lowest_id_of_a_tie_and_any_float_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(3, VOCAB, dtype=dtype)
        logits[:, 5] = logits[:, 9] = 2
        states = [
            state(params(temperature=0)),
            state(params(temperature=0, presence_penalty=0.5)),
            state(params(top_k=1)),
        ]
        assert [one.token_ids[0] for one in sample(logits, states)] == [5, 5, 5]
        assert [one.token_ids[0] for one in sample(logits[:1], states[:1])] == [5]


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.full((1, VOCAB), -1e30)
    logits[0, 7], logits[0, 8] = 1e30, NEVER
    for sampling in (
        params(),
        params(temperature=1e-9),
        params(top_p=1e-9),
        params(min_p=1.0),
        params(temperature=1e-44, top_p=0.5),
    ):
        assert sample(logits, [state(sampling, seed=5)])[0].token_ids == (7,)


def test_contradicting_masks_end_the_sequence() -> None:
    contradiction = params(allowed_token_ids=(5,), bad_words=((5,),))
    for temperature in (0.0, 1.0):
        sampled = sample(
            torch.zeros(1, VOCAB), [state(params(temperature=temperature, allowed_token_ids=(5,), bad_words=((5,),)))]
        )
        assert sampled[0].token_ids[0] in EOS
    assert contradiction.bad_words


def test_bad_words_never_complete_in_the_output() -> None:
    sampling = params(bad_words=((4, 5, 6), (7,), (5, 5)))
    prompt_does_not_count = state(sampling, prompt=(4, 5))
    assert prompt_does_not_count.banned() == [7]
    assert state(sampling, output=(4, 5)).banned() == [7, 6, 5]
    assert state(sampling, output=(4,)).banned() == [7]
    running = state(params(temperature=0, bad_words=((9, 9, 9),)))
    for _ in range(9):
        running.accept(sample(torch.nn.functional.one_hot(torch.tensor([9]), VOCAB).float(), [running])[0].token_ids[0])
    assert running.tokens[1:] == [9, 9, 0, 9, 9, 0, 9, 9, 0]


def reference_logprobs(row: list[float], chosen: int, count: int) -> TokenLogprobs:
    norm = math.log(sum(math.exp(value) for value in row))
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    return tuple((token, row[token] - norm, 1 + sum(other > row[token] for other in row)) for token in (chosen, *order))  # type: ignore[misc]


@given(st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB), tokens, st.integers(0, VOCAB))
@settings(max_examples=100, deadline=None)
def test_logprobs_are_of_the_raw_logits(row: list[int], biased: int, count: int) -> None:
    logits = torch.tensor([row]).float()
    sampled = sample(logits, [state(params(temperature=0.3, top_k=3, logprobs=count, logit_bias={biased: 50.0}))])[0]
    assert sampled.token_ids == (biased,)
    prompt = prompt_logprobs(logits, [biased], count)[0]
    assert sampled.logprobs == (prompt,)
    for got, (token, logprob, rank) in zip(
        prompt, reference_logprobs([float(value) for value in row], biased, count), strict=True
    ):
        assert (got.token_id, got.rank) == (token, rank)
        assert got.logprob == pytest.approx(logprob, abs=1e-5)


def test_logprobs_only_where_asked_and_never_infinite() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 3] = NEVER
    states = [state(params(temperature=0)), state(params(temperature=0, logprobs=0)), state(params(logprobs=VOCAB))]
    sampled = sample(logits, states)
    assert sampled[0].logprobs == ()
    assert [len(entry) for entry in sampled[1].logprobs] == [1]
    [entry] = sampled[2].logprobs
    assert len(entry) == VOCAB + 1
    assert entry[-1] == (3, -9999.0, VOCAB) or entry[-1].logprob == -9999.0


def test_prompt_logprobs_of_many_positions() -> None:
    torch.manual_seed(3)
    logits, targets = torch.randn(150, VOCAB, dtype=torch.bfloat16), list(range(VOCAB)) * 6 + list(range(6))
    report = prompt_logprobs(logits, targets, 2)
    exact = logits.double().log_softmax(dim=1)
    assert [entry[0].token_id for entry in report] == targets
    assert [entry[0].logprob for entry in report] == pytest.approx(exact[range(150), targets].tolist(), abs=1e-5)
    assert all(len(entry) == 3 and entry[1].rank == 1 for entry in report)
    assert prompt_logprobs(logits[:0], [], 2) == []
