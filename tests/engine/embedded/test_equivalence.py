"""The embedded engine against transformers' own `generate`.

In float32 and greedy, both give the same tokens, however the work is cut up.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded import core as engine_core
from engine.embedded.core import EngineCore
from engine.embedded.sampling import sampler
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.types import Delta, GenerateRequest, SamplingParams

OUTPUT = 24
COUNT = 20


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Every third begins with the same 50 tokens; the lengths sit on and around block boundaries."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 384) for _ in range(50)]
    tails = [[rng.randrange(3, 384) for _ in range(rng.choice([1, 5, 31, 32, 33, 64, 100]))] for _ in range(COUNT)]
    return [(shared if index % 3 == 0 else []) + tail for index, tail in enumerate(tails)]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Iterator[LlamaForCausalLM]:
    yield LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return output[0, len(prompt) :].tolist()

    return [generate(prompt) for prompt in prompts]


@pytest.fixture(autouse=True, params=["off", "on"])
def overlap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test of this module without and with overlap.

    With overlap the next step is prepared while one runs; results must not tell the two apart.
    """
    OPTIONS["overlap_scheduler"] = request.param
    yield


OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 2, "kv_cache_memory_mb": 16}


def make_core(folder: Path, **options: Any) -> EngineCore:
    return EngineCore(EmbeddedConfig(model=str(folder), **{**OPTIONS, **options}), lambda _: None)


def add(core: EngineCore, name: str, prompt: list[int], **sampling: Any) -> None:
    params = SamplingParams(**{"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True, **sampling})
    request = GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params)
    state = SamplerState(
        params, prompt, core.runner.eos_token_ids, params.seed or 0, None, core.runner.vocab_size, core.runner.device
    )
    logprobs = None if params.prompt_logprobs is None else [None]
    core.add(
        Sequence(request=request, sampler=state, rank=0.0, arrival=0.0, tokens=list(prompt), prompt_logprobs=logprobs)
    )


def run(core: EngineCore) -> dict[str, list[Delta]]:
    deltas: dict[str, list[Delta]] = {}
    while core.busy:
        for request_id, delta in core.step():
            assert isinstance(delta, Delta), delta.__cause__
            deltas.setdefault(request_id, []).append(delta)
    return deltas


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_the_host_is_one_step_ahead_of_the_device_at_most(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a long prompt sample nothing, and are waited for all the same."""
    done, ahead = [], []

    class Done:
        def synchronize(self) -> None:
            done.append(self)

    core = make_core(tiny_model, max_num_tokens=32)
    forward = core.runner.forward
    monkeypatch.setattr(sampler, "recorded", lambda _: Done())
    monkeypatch.setattr(
        core.runner, "forward", lambda step: (ahead.append(len(ahead) + 1 - len(done)), forward(step))[1]
    )
    add(core, "long", list(range(3, 303)), max_tokens=1)
    run(core)
    assert len(ahead) == 10
    assert max(ahead) == (2 if OPTIONS["overlap_scheduler"] == "on" else 1)


def test_a_prompt_takes_more_of_a_step_where_nothing_decodes_and_steps_are_fast(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for seconds in (0.0, 60.0):
        monkeypatch.setattr(engine_core, "CPU_PROMPT_SECONDS", seconds)
        made = make_core(tiny_model)
        add(made, "long", list(range(3, 303)))
        made.step()
        made.step()
        taken.append(made.stats().inflight_batching_stats.num_ctx_tokens)
    assert taken == [engine_core.CPU_PROMPT_TOKENS, 300 - engine_core.CPU_PROMPT_TOKENS]


def test_prompts_take_more_of_a_step_beside_decodes_where_many_wait_and_steps_are_fast(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for seconds in (0.0, 60.0):
        monkeypatch.setattr(engine_core, "CPU_CROWDED_SECONDS", seconds)
        made = make_core(tiny_model, enable_block_reuse=False)
        add(made, "decoding", list(range(3, 73)))
        made.step()
        made.step()
        for name in ("a", "b", "c"):
            add(made, name, list(range(3, 303)))
        made.step()
        taken.append(made.stats().inflight_batching_stats.num_ctx_tokens)
    assert taken == [engine_core.CPU_PROMPT_TOKENS, engine_core.CPU_MOST_PROMPT_TOKENS]


@pytest.mark.parametrize("batch", [1, 3, COUNT])
def test_greedy_equals_generate_at_every_batch_size(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]], batch: int
) -> None:
    core = make_core(tiny_model, max_batch_size=batch)
    count = 8 if batch == 1 else COUNT
    for index, prompt in enumerate(prompts[:count]):
        add(core, str(index), prompt)
    deltas = run(core)
    assert [tokens(deltas[str(index)]) for index in range(count)] == expected[:count]


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        pytest.param({"max_num_tokens": 16}, False, id="chunked"),
        pytest.param({"max_num_tokens": 50, "enable_chunked_prefill": False}, False, id="unchunked"),
        pytest.param({"enable_block_reuse": False}, False, id="no reuse"),
        pytest.param({"num_blocks": 7, "max_num_tokens": 20}, True, id="preempted"),
        pytest.param({"num_blocks": 50, "kv_block_size": 4}, True, id="preempted, small blocks"),
        pytest.param(
            {"num_blocks": 50, "kv_block_size": 4, "enable_block_reuse": False}, True, id="preempted, no reuse"
        ),
    ],
)
def test_greedy_equals_generate_however_it_is_scheduled(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]], options: dict[str, Any], preempts: bool
) -> None:
    core = make_core(tiny_model, **options)
    for index, prompt in enumerate(prompts):
        add(core, str(index), prompt)
    deltas = run(core)
    assert [tokens(deltas[str(index)]) for index in range(COUNT)] == expected
    assert (core.scheduler.preemptions > 0) == preempts
    stats = core.stats()
    assert stats.kv_cache_stats.used_num_blocks == 0
    assert stats.num_completed_requests == COUNT


def test_a_second_run_hits_the_prefix_cache_and_gives_the_same(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    core = make_core(tiny_model)
    for attempt in range(2):
        for index, prompt in enumerate(prompts):
            add(core, f"{attempt}-{index}", prompt)
        deltas = run(core)
        assert [tokens(deltas[f"{attempt}-{index}"]) for index in range(COUNT)] == expected
    for index, prompt in enumerate(prompts):
        report = deltas[f"1-{index}"][0].prompt
        assert report is not None
        assert report.cached_tokens == (len(prompt) - 1) // 32 * 32


def test_logprobs_are_those_of_the_model(
    tiny_model: Path, reference: LlamaForCausalLM, prompts: list[list[int]]
) -> None:
    prompt = prompts[0]
    core = make_core(tiny_model, max_num_tokens=40)
    add(core, "a", prompt, max_tokens=4, logprobs=3, prompt_logprobs=2)
    deltas = run(core)["a"]
    full = [*prompt, *tokens(deltas)]
    with torch.inference_mode():
        logprobs = reference(torch.tensor([full])).logits[0].log_softmax(-1)
    assert deltas[0].prompt is not None
    reported = deltas[0].prompt.logprobs
    assert reported is not None and len(reported) == len(prompt) and reported[0] is None
    entries = [*reported[1:], *(entry for delta in deltas for entry in delta.logprobs)]
    for position, entry in enumerate(entries):
        assert entry is not None
        row, token = logprobs[position], full[position + 1]
        assert entry[0].token_id == token
        assert entry[0].logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry[0].rank == 1 + int((row > row[token]).sum())
        count = 2 if position < len(prompt) - 1 else 3
        assert [item.logprob for item in entry[1:]] == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)


def test_seeds_give_the_same_tokens_whatever_the_batch_and_the_pressure(
    tiny_model: Path, prompts: list[list[int]]
) -> None:
    def sample(core: EngineCore, names: range) -> list[list[int]]:
        for index in names:
            add(core, str(index), prompts[index], temperature=1.0, top_p=0.9, seed=index)
        deltas = run(core)
        return [tokens(deltas[str(index)]) for index in names]

    alone = sample(make_core(tiny_model, max_batch_size=1), range(8))
    together = sample(make_core(tiny_model), range(8))
    squeezed = make_core(tiny_model, num_blocks=8, max_num_tokens=30)
    assert together == alone
    assert sample(squeezed, range(8)) == alone
    assert squeezed.scheduler.preemptions > 0


def test_abort_frees_at_once_and_leaves_the_others_alone(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    core = make_core(tiny_model)
    for index in range(8):
        add(core, str(index), prompts[index])
    begun = dict(core.step())
    for index in range(0, 8, 2):
        core.abort(str(index))
    rest = run(core)
    assert sorted(rest) == ["1", "3", "5", "7"]
    for index in range(1, 8, 2):
        name = str(index)
        assert tokens(([begun[name]] if name in begun else []) + rest[name]) == expected[index]  # type: ignore[operator]
    assert core.stats().num_aborted_requests == 4


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_stop_token_ends_the_output_and_nothing_follows(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]], penalty: float
) -> None:
    """Overlap adapts to ends of sequences and to penalties.

    A sequence is found to have ended when its next step is under way; a penalty needs every token before the next.
    """
    core = make_core(tiny_model, max_batch_size=4)
    for index in range(12):
        add(
            core,
            str(index),
            prompts[index],
            stop_token_ids=(expected[index][9],),
            repetition_penalty=penalty,
            min_tokens=index % 3,
        )
    deltas = run(core)
    for index in range(12):
        output, stop = tokens(deltas[str(index)]), expected[index][9]
        last = deltas[str(index)][-1]
        if penalty == 1.0:
            place = next(i for i, token in enumerate(expected[index]) if token == stop and i >= index % 3)
            assert output == expected[index][: place + 1] or index % 3
        assert (last.finish_reason, last.stop_reason) == (("stop", stop) if output[-1] == stop else ("length", None))
        assert stop not in output[index % 3 : -1] and len(output) <= OUTPUT
    assert core.stats().kv_cache_stats.used_num_blocks == 0


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_few_tokens_are_exactly_as_many_as_asked_for(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]], wanted: int
) -> None:
    core = make_core(tiny_model)
    for index in range(6):
        add(core, str(index), prompts[index], max_tokens=wanted)
    deltas = run(core)
    assert [tokens(deltas[str(index)]) for index in range(6)] == [output[:wanted] for output in expected[:6]]
    assert all(deltas[str(index)][-1].finish_reason == "length" for index in range(6))


def test_a_failing_step_fails_its_sequences_and_the_engine_goes_on(
    tiny_model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    core = make_core(tiny_model)
    forward = core.runner.forward
    core.runner.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))  # type: ignore[method-assign]
    add(core, "a", prompts[0])
    [(name, failure)] = core.step()
    assert name == "a" and not isinstance(failure, Delta) and isinstance(failure.__cause__, RuntimeError)
    core.runner.forward = forward  # type: ignore[method-assign]
    add(core, "b", prompts[0])
    assert tokens(run(core)["b"]) == expected[0]
