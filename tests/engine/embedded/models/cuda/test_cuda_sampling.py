"""The kernels that sample against the reference sampler, parameter by parameter and in mixed batches.

On a GPU, or by Triton's interpreter where Triton is installed without one.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.embedded.models.cuda.sampler import CudaSampler
from engine.embedded.sampling.sampler import Sampled, Sampler
from engine.embedded.sampling.state import SamplerState
from engine.types import Logprob, SamplingParams
from tests.support.cuda import ON_GPU, FixedMask, interpreter  # noqa: F401 - a fixture

pytestmark = [pytest.mark.usefixtures("interpreter"), *([pytest.mark.gpu] if ON_GPU else [])]

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
VOCAB = 5000
"""More than two chunks of ids."""
EOS = (1, 7)
STEPS = 4

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 50},
    "top_k 1": {"top_k": 1},
    "top_k of nearly all": {"top_k": VOCAB - 1, "temperature": 3.0},
    "top_p": {"top_p": 0.9},
    "top_p of nearly nothing": {"top_p": 1e-6},
    "top_p of nearly all": {"top_p": 0.999, "temperature": 2.0},
    "top_k and top_p": {"top_k": 50, "top_p": 0.95, "temperature": 0.8},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    "frequency": {"frequency_penalty": 0.5},
    "presence": {"presence_penalty": 1.5, "temperature": 0},
    "repetition": {"repetition_penalty": 1.3, "top_p": 0.9},
    "all penalties": {
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.7,
        "temperature": 0,
    },
    "bias": {"logit_bias": {5: 100.0, 6: -100.0, 4000: 99.5}},
    "ban": {"bad_words": ((3,), (4,)), "temperature": 0, "logit_bias": {3: 100.0}},
    "allowed": {"allowed_token_ids": (10, 11, 12, 4999), "logit_bias": {11: 1.0}},
    "min_tokens": {"min_tokens": 2, "temperature": 0, "logit_bias": {1: 50.0}},
    "min_tokens and stops": {"min_tokens": 3, "stop_token_ids": (9, 4998), "ignore_eos": True, "logit_bias": {9: 60.0}},
    "contradiction": {"allowed_token_ids": (5,), "bad_words": ((5,),)},
    "greedy contradiction": {"allowed_token_ids": (5,), "bad_words": ((5,),), "temperature": 0},
    "long bad words": {"bad_words": ((3, 4), (5, 6, 7))},
    "logprobs": {"logprobs": 1},
    "many logprobs": {"logprobs": 20, "temperature": 0},
    "more logprobs": {"logprobs": 25, "top_k": 10},
    "own logprob": {"logprobs": 0, "frequency_penalty": 2.0},
}


def state(values: dict[str, Any], seed: int, prompt: Sequence[int] = (3, 9, 3), vocab: int = VOCAB) -> SamplerState:
    sampling = SamplingParams(**{"max_tokens": 100, "seed": seed, **values})
    return SamplerState(sampling, prompt, EOS, seed, None, vocab, DEVICE)


class Device:
    """A sampler of kernels, and what a runner does for it."""

    def __init__(self, rows: int, vocab: int = VOCAB) -> None:
        self.sampler = CudaSampler(vocab, rows, torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE), EOS)

    def draw(self, logits: torch.Tensor, states: Sequence[SamplerState], slots: Sequence[int]) -> list[Sampled]:
        self.sampler.enter(slots, [1] * len(slots), states)
        positions = [each.num_prompt + each.position - 1 for each in states]
        inputs = (slots, positions, [each.tokens[-1] for each in states])
        self.sampler.results = self.sampler.run(logits, *(torch.tensor(each, device=DEVICE) for each in inputs))
        drawn = self.sampler.draw(logits, states, slots)
        assert self.sampler._sampled[torch.tensor(slots, device=DEVICE)].equal(drawn.tokens)
        return drawn.results()


def same(found: Sequence[Sampled], expected: Sequence[Sampled]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert [(item.token_id, item.rank) for item in mine] == [(item.token_id, item.rank) for item in theirs]
            assert [item.logprob for item in mine] == pytest.approx([item.logprob for item in theirs], abs=1e-4)


def random_logits(rows: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    torch.manual_seed(seed)
    return (torch.randn(rows, VOCAB) * spread).to(torch.bfloat16 if ON_GPU else torch.float32).to(DEVICE)


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_every_parameter_gives_the_tokens_of_the_reference(name: str) -> None:
    """Three sequences over some steps: output tokens are counted on the device."""
    rows, device = 3, Device(3)
    mine, theirs = ([state(CASES[name], seed) for seed in range(rows)] for _ in range(2))
    for step in range(STEPS):
        logits = random_logits(rows, step)
        expected = Sampler(VOCAB, DEVICE).sample(logits.clone(), theirs)
        found = device.draw(logits, mine, list(range(rows)))
        same(found, expected)
        for each, sampled in zip([*mine, *theirs], [*expected, *expected], strict=True):
            each.accept(sampled.token_ids[0])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["plain", "all penalties", "repetition", "min_tokens", "ban", "long bad words"])
def test_a_sequence_may_be_entered_before_its_first_token_is_known(name: str) -> None:
    """As one whose prompt another replica computes: the first token counts when it is computed."""
    rows, device = 3, Device(3)
    mine, theirs = ([state(CASES[name], seed) for seed in range(rows)] for _ in range(2))
    device.sampler.enter(range(rows), [1] * rows, mine)
    for seed, each in enumerate([*mine, *theirs]):
        each.resume(20 + seed % rows)
    for step in range(STEPS):
        logits = random_logits(rows, step)
        expected = Sampler(VOCAB, DEVICE).sample(logits.clone(), theirs)
        same(device.draw(logits, mine, list(range(rows))), expected)
        for each, sampled in zip([*mine, *theirs], [*expected, *expected], strict=True):
            each.accept(sampled.token_ids[0])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["plain", "greedy", "top_k and top_p", "logprobs", "more logprobs", "long bad words"])
def test_tokens_behind_right_drafts_are_those_of_steps_of_their_own(name: str) -> None:
    """Two sequences with two drafted tokens each: the rows of one step are drawn from one after the other."""
    rows, device = 3, Device(6)
    mine, theirs = ([state(CASES[name], seed) for seed in range(2)] for _ in range(2))
    logits = random_logits(2 * rows, 1)
    slots = [0, 1]
    device.sampler.enter(slots, [1, 1], mine)
    positions = [each.num_prompt + each.position - 1 + row for each in mine for row in range(rows)]
    inputs = ([0] * rows + [1] * rows, positions, [3] * 2 * rows)
    device.sampler.results = device.sampler.run(logits, *(torch.tensor(each, device=DEVICE) for each in inputs))
    for row in range(rows):
        places = [row, rows + row]
        expected = Sampler(VOCAB, DEVICE).sample(logits[places].clone(), theirs)
        found = device.sampler.draw(logits, mine, slots, places).results()
        same(found, expected)
        for states, sampled in ((mine, found), (theirs, expected)):
            for each, one in zip(states, sampled, strict=True):
                each.accept(one.token_ids[0])


@torch.inference_mode()
def test_a_batch_in_which_each_request_differs() -> None:
    """Sequences come and go; each gets the tokens that it gets alone."""
    rng = random.Random(1)
    device, places = Device(len(CASES)), list(range(len(CASES)))
    rng.shuffle(places)
    states = [state(values, 100 + index, (index, 9)) for index, values in enumerate(CASES.values())]
    for step in range(STEPS):
        present = [index for index in range(len(states)) if index != step]
        logits = random_logits(len(present), 50 + step)
        reference = Sampler(VOCAB, DEVICE)
        expected = [
            reference.sample(logits[row : row + 1].clone(), [states[index]])[0] for row, index in enumerate(present)
        ]
        same(device.draw(logits, [states[index] for index in present], [places[index] for index in present]), expected)
        for index, sampled in zip(present, expected, strict=True):
            states[index].accept(sampled.token_ids[0])
        # One leaves its slot to a sequence with another seed and nothing of the first.
        states[step] = state({"frequency_penalty": 0.5}, 500 + step, (4, 4))
        device.sampler._admitted[places[step]] = -1


@torch.inference_mode()
@pytest.mark.parametrize("spread", [0.0, 0.01, 40.0])
def test_flat_and_steep_distributions(spread: float) -> None:
    """All ids tie, more ids stay than are collected, or one stays."""
    values = [{}, {"top_p": 0.5}, {"top_k": 3000}, {"top_k": 10, "top_p": 0.3}, {"min_p": 0.999}, {"logprobs": 5}]
    states = [state(each, seed) for seed, each in enumerate(values)]
    logits = random_logits(len(states), 7, spread)
    same(
        Device(len(states)).draw(logits, states, list(range(len(states)))),
        Sampler(VOCAB, DEVICE).sample(logits.clone(), states),
    )


@torch.inference_mode()
@pytest.mark.parametrize("spread", [0.1, 1.0, 2.5, 8.0])
def test_truncation_by_any_values(spread: float) -> None:
    """Flat rows, of which truncation keeps thousands of ids, to steep ones; on a GPU of a large vocabulary."""
    rng, rows, vocab = random.Random(spread), 24, 151_936 if ON_GPU else VOCAB
    torch.manual_seed(11)
    logits = (torch.randn(rows, vocab) * spread).to(torch.bfloat16 if ON_GPU else torch.float32).to(DEVICE)
    values = [
        {
            "temperature": rng.uniform(0.1, 2),
            "top_p": rng.choice([0.9999, 0.99, 0.9, 0.5, 0.1]),
            "top_k": rng.choice([0, 0, 5, 50, 1000]),
            "min_p": rng.choice([0, 0, 0.01, 0.2]),
        }
        for _ in range(rows)
    ]
    states = [state(each, seed, vocab=vocab) for seed, each in enumerate(values)]
    same(
        Device(rows, vocab).draw(logits, states, list(range(rows))),
        Sampler(vocab, DEVICE).sample(logits.clone(), states),
    )


@torch.inference_mode()
@pytest.mark.parametrize("more", [False, True])
def test_top_p_ends_where_its_sum_is_reached(more: bool) -> None:
    """Each id weighs half of the one before it: a little more than the first three weigh takes the fourth, too."""
    rows, ids, weights = 100, [8, 4000, 70, 2500, 9, 3], 0.5 ** torch.arange(6.0)
    logits = torch.full((rows, VOCAB), -1e4, device=DEVICE)
    logits[:, ids] = weights.log().to(DEVICE)
    top_p = float(weights[:3].sum() / weights.sum()) * (1.0005 if more else 0.9995)
    states = [state({"top_p": top_p}, seed) for seed in range(rows)]
    drawn = {sampled.token_ids[0] for sampled in Device(rows).draw(logits, states, list(range(rows)))}
    assert drawn == set(ids[: 4 if more else 3])


@torch.inference_mode()
def test_a_long_tail_below_all_thresholds() -> None:
    """Where truncation ends so far below the likeliest id that no other one can be drawn, and before that."""
    values = [{"top_p": 0.99999}, {"top_k": 4000, "top_p": 0.99999}, {"top_k": 40}, {"top_k": 40, "top_p": 0.5}]
    for gap in (16.0, 29.0, 31.0, 200.0):
        logits = torch.zeros((len(values), VOCAB), device=DEVICE)
        logits[:, 17] = gap
        logits[:, 20:2000] = -1.0
        states = [state(each, seed) for seed, each in enumerate(values)]
        slots = list(range(len(values)))
        same(Device(len(values)).draw(logits, states, slots), Sampler(VOCAB, DEVICE).sample(logits.clone(), states))


@torch.inference_mode()
def test_more_candidates_than_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.embedded.models.cuda import sampling_kernels  # noqa: PLC0415

    monkeypatch.setattr(sampling_kernels, "CANDIDATES", 64)
    states = [state(each, seed) for seed, each in enumerate([{"top_k": 200}, {"top_p": 0.95}, {"top_k": 5}])]
    logits = random_logits(3, 8, 1.0)
    same(Device(3).draw(logits, states, [2, 0, 1]), Sampler(VOCAB, DEVICE).sample(logits.clone(), states))


@torch.inference_mode()
@pytest.mark.parametrize("values", [{}, {"top_k": 6, "temperature": 1.3}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_draws_follow_the_exact_distribution(values: dict[str, Any]) -> None:
    """Chi-square over ten ids; those that are cut never come."""
    draws, rounds = (4096, 8) if ON_GPU else (100, 1)
    logits = torch.full((VOCAB,), -1e4)
    torch.manual_seed(4)
    ids = torch.randperm(VOCAB)[:10]
    logits[ids] = torch.randn(10) * 1.5
    exact = _distribution(logits.double(), SamplingParams(max_tokens=1, **values))
    counts, device = torch.zeros(VOCAB), Device(draws)
    whole = logits.to(DEVICE).repeat(draws, 1)
    for number in range(rounds):
        device.sampler._admitted = [-1] * (draws + 1)
        states = [state(values, number * draws + seed) for seed in range(draws)]
        for sampled in device.draw(whole, states, list(range(draws))):
            counts[sampled.token_ids[0]] += 1
    assert not counts[exact == 0].any()
    kept = exact > 0
    expected = exact[kept] * draws * rounds
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 27.9  # 99.9 % for 9 degrees of freedom


def _distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    weights = (logits / sampling.temperature).softmax(0)
    order = weights.sort(descending=True)
    if sampling.top_k:
        weights[order.indices[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        cut = int((order.values.cumsum(0) < sampling.top_p).sum()) + 1
        weights[order.indices[cut:]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guided_rows_are_drawn_by_their_masks(temperature: float) -> None:
    """Among rows without a grammar, in whatever place; a mask that leaves only banned ids decides alone."""
    values: list[dict[str, Any]] = [
        {"temperature": temperature},
        {"temperature": temperature, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": temperature, "bad_words": ((70,), (71,))},
        {},
    ]
    allowed = [{8, 40, 4000}, set(range(0, VOCAB, 3)), {70, 71}, None]

    def states() -> list[SamplerState]:
        made = []
        for index, (each, ids) in enumerate(zip(values, allowed, strict=True)):
            sampling = SamplingParams(**{"max_tokens": 100, "seed": index, **each})
            matcher: Any = None if ids is None else FixedMask(ids)
            made.append(SamplerState(sampling, (3,), EOS, index, matcher, VOCAB, DEVICE))
        return made

    device, mine, theirs = Device(6), states(), states()
    assert device.sampler.waits(mine) and not device.sampler.waits(mine[3:])
    for step in range(2):
        logits = random_logits(4, 60 + step)
        expected = Sampler(VOCAB, DEVICE).sample(logits.clone(), theirs)
        same(device.draw(logits, mine, [5, 0, 3, 2]), expected)
        for sampled, ids in zip(expected[:3], allowed, strict=False):
            assert ids is not None and sampled.token_ids[0] in ids
        for each, sampled in zip([*mine, *theirs], [*expected, *expected], strict=True):
            each.accept(sampled.token_ids[0])


@torch.inference_mode()
def test_nan_and_infinite_logits_are_ignored() -> None:
    logits = random_logits(3, 9)
    logits[0, 5] = float("nan")
    logits[1] = float("-inf")
    logits[1, 44] = -3.0
    logits[2] = float("nan")
    states = [state({"temperature": 0}, 0), state({"logprobs": 3}, 1), state({}, 2)]
    first, second, third = Device(3).draw(logits, states, [0, 1, 2])
    assert first.token_ids != (5,)
    assert second.token_ids == (44,) and second.logprobs[0][0] == Logprob(44, 0.0, 1)
    assert third.token_ids[0] in EOS
