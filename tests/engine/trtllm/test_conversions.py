"""Pure conversions between our types and TensorRT-LLM's.

They are requests, cumulative outputs and our deltas, events and statistics.
"""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.errors import EngineFailure, InvalidRequest
from engine.kv_events import Created, EventDiff, Removed, Stored, Updated
from engine.trtllm.outputs import FLOOR, Outputs
from engine.trtllm.polling import iteration_stats, kv_capacity, kv_event
from engine.trtllm.sampling import MASKED, bias_of, guide_keywords, sampling_keywords
from engine.trtllm.versions import version_of
from engine.types import Delta, GenerateRequest, Guide, GuideKind, SamplingParams

EOS = (2, 7)
VERSION = version_of("1.2.1")


def keywords(**fields: Any) -> dict[str, Any]:
    return sampling_keywords(SamplingParams(**{"max_tokens": 5, **fields}), EOS, VERSION)


def test_a_plain_request_says_what_the_engine_would_not_assume() -> None:
    """Its own defaults are greedy and 32 tokens, and with an explicit end id it adds no further ends by itself."""
    assert keywords() == {
        "end_id": 2,
        "ignore_eos": False,
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "detokenize": False,
        "max_tokens": 5,
        "temperature": 1.0,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 7}, {"top_k": 1}),
        (
            {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
            {"temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1},
        ),
        ({"max_tokens": 0}, {"max_tokens": 1}),
        ({"min_tokens": 3, "seed": 0}, {"min_tokens": 3, "seed": 0}),
        ({"ignore_eos": True, "stop_token_ids": (9, 8)}, {"ignore_eos": True, "stop_token_ids": [8, 9]}),
        ({"stop_token_ids": (9, 7)}, {"stop_token_ids": [7, 9]}),
        ({"logprobs": 0, "prompt_logprobs": 3}, {"logprobs": 1, "prompt_logprobs": 3}),
        (
            {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.5},
            {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.5},
        ),
    ],
)
def test_fields_that_are_asked_for(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected.items() <= keywords(**fields).items()


def test_greedy_says_nothing_of_drawing() -> None:
    assert not {"temperature", "top_p", "min_p"} & keywords(temperature=0.0, top_p=0.5, min_p=0.2).keys()


def test_a_model_without_an_end_never_ends_by_itself() -> None:
    assert sampling_keywords(SamplingParams(max_tokens=1), (), VERSION)["end_id"] == -1


def test_biases() -> None:
    assert bias_of(SamplingParams(max_tokens=1)) is None
    assert bias_of(SamplingParams(max_tokens=1, logit_bias={3: 2.0})) == {3: 2.0}
    allowed = bias_of(SamplingParams(max_tokens=1, logit_bias={3: 2.0, 5: 1.0}, allowed_token_ids=(3, 4)))
    assert allowed == {-1: MASKED, 3: 2.0, 4: 0.0}


@pytest.mark.parametrize(
    ("kind", "spec", "expected"),
    [
        ("json_schema", '{"type": "object"}', {"json": '{"type": "object"}'}),
        ("json_object", "", {"json_object": True}),
        ("regex", "a+", {"regex": "a+"}),
        ("grammar", 'root ::= "x"', {"grammar": 'root ::= "x"'}),
        ("choice", json.dumps(["a.b", "c|d", None]), {"regex": r"(a\.b|c\|d)"}),
    ],
)
def test_guides(kind: GuideKind, spec: str, expected: dict[str, Any]) -> None:
    assert guide_keywords(Guide(kind, spec)) == expected


def test_a_choice_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        guide_keywords(Guide("choice", "[null]"))


@dataclass
class Score:
    logprob: float
    rank: int | None = None


@dataclass
class Output:
    """A CompletionOutput, mutated from step to step as theirs is."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    request_perf_metrics: Any = None


class Run:
    """One request and the object that its responses mutate."""

    def __init__(self, **sampling: Any) -> None:
        self.output = Output()
        self.result = SimpleNamespace(outputs=[self.output], cached_tokens=3)
        params = SamplingParams(**{"max_tokens": 9, **sampling})
        self.outputs = Outputs(GenerateRequest(request_id="r", prompt_token_ids=(4, 5, 6), sampling=params), EOS)

    def step(self, *tokens: int, **changes: Any) -> Delta | None:
        self.output.token_ids += tokens
        for name, value in changes.items():
            setattr(self.output, name, value)
        return self.outputs.feed(self.result)


def test_cumulative_outputs_become_deltas() -> None:
    run = Run()
    first = run.step(10)
    assert (
        first is not None and first.token_ids == (10,) and first.prompt is not None and first.prompt.cached_tokens == 3
    )
    assert run.step() is None
    assert run.step(11, 12) == Delta((11, 12))
    assert run.step(finish_reason="length") == Delta((), finish_reason="length")


@pytest.mark.parametrize(
    ("tokens", "reason", "expected", "stop"),
    [
        ((10, 2), None, (10, 2), None),
        ((10,), None, (10, 2), None),
        ((10, 7), 7, (10, 7), None),
        ((10,), 7, (10, 7), None),
        ((10, 9), 9, (10, 9), 9),
        ((10,), 9, (10, 9), 9),
        ((), None, (2,), None),
    ],
)
def test_the_token_that_ended_the_sequence_is_the_last(
    tokens: tuple[int, ...], reason: int | None, expected: tuple[int, ...], stop: int | None
) -> None:
    """Whether the engine leaves it in the output or cuts it off."""
    delta = Run(stop_token_ids=(9,)).step(*tokens, finish_reason="stop", stop_reason=reason)
    assert delta is not None
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == (expected, "stop", stop)


def test_logprobs_come_with_their_tokens_and_the_sampled_one_first() -> None:
    run = Run(logprobs=2)
    first = run.step(10, logprobs=[{10: Score(-1.0), 11: Score(-0.5), 12: Score(-3.0)}])
    assert first is not None
    (position,) = first.logprobs
    assert [(entry.token_id, entry.rank) for entry in position] == [(10, 2), (11, 1), (10, 2)]
    second = run.step(11, 12, logprobs=[*run.output.logprobs, {11: Score(-0.1, 1)}, -0.25])
    assert second is not None
    assert [position[0].token_id for position in second.logprobs] == [11, 12]
    assert second.logprobs[1][0].logprob == -0.25
    last = run.step(13, finish_reason="length")
    assert last is not None and last.logprobs[0][0].logprob == FLOOR, (
        "what the engine leaves out is said to be next to impossible"
    )


def test_the_sampled_token_alone() -> None:
    delta = Run(logprobs=0).step(10, logprobs=[{10: Score(-1.0, 1)}])
    assert delta is not None
    assert [[entry.token_id for entry in position] for position in delta.logprobs] == [[10]]


@pytest.mark.parametrize("entries", [2, 3])
@pytest.mark.parametrize("late", [False, True])
def test_prompt_logprobs_are_on_the_first_delta_whenever_they_come(entries: int, late: bool) -> None:
    run = Run(prompt_logprobs=1)
    scores = [{5: Score(-1.0, 1)}, {6: Score(-2.0, 3), 1: Score(-0.1, 1)}, {10: Score(-1.0, 1)}][:entries]
    if late:
        assert run.step(10) is None
    delta = run.step(*([11] if late else [10, 11]), prompt_logprobs=scores)
    assert delta is not None and delta.token_ids == (10, 11)
    assert delta.prompt is not None and delta.prompt.logprobs is not None
    first, second, third = delta.prompt.logprobs
    assert first is None and second is not None and third is not None
    assert [(entry.token_id, entry.rank) for entry in second] == [(5, 1), (5, 1)]
    assert [(entry.token_id, entry.rank) for entry in third] == [(6, 3), (1, 1)]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([{6: Score(-2.0)}], "1 log-probabilities for 3 prompt tokens"),
        ([{9: Score(-0.1)}, {6: Score(-2.0)}], "no log-probability of prompt token 5"),
    ],
)
def test_prompt_logprobs_of_which_one_is_missing_are_a_failure(scores: list[Any], said: str) -> None:
    """1.2.1 has those of the most likely tokens, and of positions that were not reused."""
    with pytest.raises(EngineFailure, match=said):
        Run(prompt_logprobs=1).step(10, prompt_logprobs=scores)


def test_a_prompt_alone_gives_no_token() -> None:
    run = Run(max_tokens=0)
    assert run.step(10) is None
    assert run.step(finish_reason="length") == Delta((), finish_reason="length", prompt=run_report(run))


def run_report(run: Run) -> Any:
    return Run(max_tokens=0).outputs._report(run.result, run.output)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_an_end_that_nobody_asked_for_is_a_failure(reason: str) -> None:
    with pytest.raises(EngineFailure, match=reason):
        Run().step(finish_reason=reason)


def raw(data: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"event_id": 4, "window_size": 512, "data": data, **more}


def test_events() -> None:
    created = kv_event(raw({"type": "created", "num_blocks_per_cache_level": [8, 0]}, attention_dp_rank=1))
    assert created is not None and created.data == Created((8, 0)) and created.attention_dp_rank == 1
    token = {"type": "unique_token", "token_id": 5, "token_extra_id": 0}
    block = {
        "type": "stored_block",
        "block_hash": -1,
        "tokens": [token],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": [],
    }
    stored = kv_event(raw({"type": "stored", "parent_hash": None, "blocks": [block]}))
    assert stored is not None and isinstance(stored.data, Stored)
    assert stored.data.blocks[0].block_hash == (1 << 64) - 1, "hashes are unsigned"
    removed = kv_event(raw({"type": "removed", "block_hashes": [(1 << 63) + 5, -2]}))
    assert removed is not None and removed.data == Removed(((1 << 63) + 5, (1 << 64) - 2))
    diff = {"type": "event_diff", "new_value": 1, "old_value": 0}
    updated = kv_event(raw({"type": "updated", "block_hash": 3, "cache_level": diff, "priority": None}))
    assert updated is not None and updated.data == Updated(3, EventDiff(1, 0))


def test_events_keep_what_they_say_of_images() -> None:
    keys = [
        {"type": "mm_key", "hash": "0f" * 32, "start_offset": 0},
        {"type": "mm_key", "hash": "f0" * 32, "start_offset": 48},
    ]
    token = {"type": "unique_token", "token_id": 5, "token_extra_id": 3}
    block = {
        "type": "stored_block",
        "block_hash": 7,
        "tokens": [token],
        "cache_level": 0,
        "priority": 35,
        "mm_keys": keys,
    }
    event = raw({"type": "stored", "parent_hash": 6, "blocks": [block]})
    assert json.loads(msgspec.json.encode(kv_event(event))) == event


def test_events_of_mains_kv_cache_manager_v2() -> None:
    """Hashes are SHA-256 in hex, the first token of an image is its digest, and keys may have a UUID."""
    digest, block, parent = "ab" * 32, "80" + "00" * 30 + "01", "ff" * 32
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in (5, digest, 65, 66)]
    key = {"type": "mm_key", "hash": digest, "start_offset": 0, "uuid": "cat"}
    stored = {
        "type": "stored_block", "block_hash": block, "tokens": tokens, "cache_level": 0, "priority": 35,
        "mm_keys": [key],
    }  # fmt: skip
    extra = {"hash_algo": "v2_sha256", "layer_group_id": 0}
    event = kv_event(raw({"type": "stored", "parent_hash": parent, "blocks": [stored]}, **extra))
    assert isinstance(event.data, Stored) and event.data.parent_hash == (1 << 64) - 1
    (found,) = event.data.blocks
    assert found.block_hash == 1 << 63, "the first 64 bits, as main truncates them itself"
    assert [token.token_id for token in found.tokens] == [5, 0, 65, 66] and found.mm_keys == (key,)
    removed = kv_event(raw({"type": "removed", "block_hashes": [block]}, **extra))
    assert removed.data == Removed((1 << 63,))


@pytest.mark.parametrize("data", [{"type": "exploded"}, {"type": "removed"}, {}])
def test_malformed_events_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        kv_event(raw(data))


@pytest.mark.parametrize(
    "broken",
    [
        {"iter": "seven"},
        {"iterLatencyMS": "slow"},
        {"numActiveRequests": [1]},
        {"kvCacheStats": {"maxNumBlocks": "x"}},
        {"kvCacheStats": [1]},
    ],
)
def test_malformed_statistics_are_refused(broken: dict[str, Any]) -> None:
    with pytest.raises((msgspec.ValidationError, AttributeError, TypeError, ValueError)):
        iteration_stats(broken)


def test_the_capacity_of_the_cache_is_the_engines_own_word_or_unknown() -> None:
    assert kv_capacity({"kvCacheStats": {"maxNumBlocks": 10, "tokensPerBlock": 64}}) == (10, 64)
    for silent in (
        {},
        {"kvCacheStats": None},
        {"kvCacheStats": {"maxNumBlocks": 10}},
        {"kvCacheStats": {"tokensPerBlock": 64}},
    ):
        assert kv_capacity(silent) is None
    for cache in (
        {"maxNumBlocks": 0, "tokensPerBlock": 64},
        {"maxNumBlocks": -1, "tokensPerBlock": 64},
        {"maxNumBlocks": 1, "tokensPerBlock": 0},
    ):
        with pytest.raises(EngineFailure, match="free_gpu_memory_fraction"):
            kv_capacity({"kvCacheStats": cache})


@pytest.mark.parametrize(
    "fault", [{"outputs": []}, {"outputs": [Output(token_ids=[5], logprobs=[{5: None}])]}, {"outputs": None}]
)
def test_a_response_of_an_unknown_shape_is_that_requests_failure(fault: dict[str, Any]) -> None:
    run = Run(logprobs=1)
    with pytest.raises(EngineFailure, match="malformed response"):
        run.outputs.feed(SimpleNamespace(cached_tokens=0, **fault))


def test_statistics_may_lack_every_key() -> None:
    assert iteration_stats({}).kv_cache_stats.max_num_blocks == 0
    stats = iteration_stats(
        {
            "iter": 7,
            "iterLatencyMS": 1.5,
            "numActiveRequests": 2,
            "kvCacheStats": {
                "maxNumBlocks": 10,
                "usedNumBlocks": 3,
                "freeNumBlocks": 7,
                "tokensPerBlock": 32,
                "cacheHitRate": None,
            },
            "inflightBatchingStats": {"numContextRequests": 1, "unheardOf": 1},
            "specDecodingStats": None,
        }
    )
    assert (stats.iteration, stats.iter_latency_ms, stats.num_active_requests) == (7, 1.5, 2)
    assert (stats.kv_cache_stats.used_num_blocks, stats.inflight_batching_stats.num_context_requests) == (3, 1)
