"""Gotchas 9 to 16 of TensorRT-LLM 1.2.1: arguments, polls, failures, and what of it the adapter leaves alone."""

import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from engine.config import TrtllmConfig
from engine.errors import EngineDied, EngineFailure, EngineNotReady
from engine.kv_events import EventDiff, KvEvent, Updated
from engine.trtllm import library, watching
from engine.trtllm.arguments import defaults, forced, merge, problems
from engine.trtllm.polling import iteration_stats, kv_event, kv_event_poller
from engine.trtllm.support import Edits
from engine.types import SamplingParams
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import API, faults, found, registered, sampling
from tests.support.trtllm_contract_api import ATTRIBUTES
from tests.support.trtllm_gotchas import FACTS, PRODUCT, SOURCES, arguments_of, request, running, tokens
from tests.support.waiting import until

trt, folder, calls = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder, trtllm_gotchas_support.calls  # fixtures


@pytest.mark.parametrize(
    ("speculative", "named"),
    [
        ({"decoding_type": "Eagle3", "max_draft_len": 2}, "speculative_config"),
        ({"decoding_type": "Draft_Target"}, "speculative_config"),
        ({"decoding_type": "User_Provided", "drafter": None}, "speculative_config"),
        ({"decoding_type": "NGram", "max_draft_len": 2}, "speculative_config.max_matching_ngram_size"),
    ],
)
def test_gotcha_09_speculative_keys_are_those_of_1_2_1(folder: Path, speculative: dict[str, Any], named: str) -> None:
    """Newer spellings are refused by name before a GPU is needed.

    The engine gets instances, made from a copy, whose key has been popped.
    """
    assert [problem.partition(":")[0] for problem in problems({"speculative_config": speculative})] == [named]
    right = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "draft"}
    config = TrtllmConfig(model=str(folder), arguments={"speculative_config": right})
    assert problems(config.arguments) == []
    with library.load(config) as llm:
        assert isinstance(llm.args.speculative_config, found("tensorrt_llm.llmapi.EagleDecodingConfig"))
    assert config.arguments == {
        "speculative_config": {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "draft"}
    }


def test_gotcha_10_no_automatic_moe_three_required_fields_and_no_unknown_ones() -> None:
    assert problems({"moe_config": {"backend": "AUTO"}})[0].startswith("moe_config.backend")
    assert "backend" not in arguments_of("aggregated").get("moe_config", {}), "what is not said stays CUTLASS"
    assert "dynamic_batch_config" not in defaults(0.9)["scheduler_config"], "it has no effect on the PyTorch backend"
    ours = {
        "enable_batch_size_tuning": True,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    }
    assert ours.keys() == API["models"]["DynamicBatchConfig"]["fields"].keys()
    for name in ours:
        without = {key: value for key, value in ours.items() if key != name}
        (problem,) = problems({"scheduler_config": {"dynamic_batch_config": without}})
        assert name in problem
    for field, text in ATTRIBUTES["TorchLlmArgs"].items():
        if text.endswith(("Config", "Config]")) and field not in ("speculative_config", "sparse_attention_config"):
            assert f"{field}.no_such_field: TensorRT-LLM 1.2.1 has no such argument" in problems(
                {field: {"no_such_field": 1}}
            )


async def test_gotcha_11_a_lora_request_is_never_made(folder: Path, calls: list[Any]) -> None:
    async with running(folder) as engine:
        await tokens(engine, request())
    assert all("lora_request" not in kwargs for _, kwargs in calls)
    assert not [path for path in PRODUCT if "LoRARequest" in path.read_text(encoding="utf-8")]


async def test_gotcha_12_events_can_be_lost_and_have_conditions(folder: Path) -> None:
    """Events that the worker cannot serialise leave a gap in the ids, and the polling goes on.

    Options that events and statistics need are forced or refused.
    """
    events: list[KvEvent] = []
    cache = {"event_buffer_max_size": 100, "tokens_per_block": 4}
    with library.load(TrtllmConfig(model=str(folder), arguments={"kv_cache_config": cache})) as llm:
        poller = kv_event_poller(llm, events.append)
        try:
            await llm.generate_async([9] * 5, sampling())
            await until(lambda: len(events) > 1)
            faults().event_poll_error = "'NoneType' object has no attribute 'new_value'"
            await until(lambda: faults().event_poll_error is None)
            await llm.generate_async([8] * 5, sampling())
            await llm.generate_async([7] * 5, sampling())
            await until(lambda: any(event.event_id >= 2 for event in events))
        finally:
            await poller.stop()
    half = {
        "type": "updated",
        "block_hash": 1,
        "cache_level": None,
        "priority": {"type": "event_diff", "new_value": 1, "old_value": 2},
    }
    event = kv_event({"event_id": 0, "window_size": 1, "data": half})
    assert event is not None and event.data == Updated(1, None, EventDiff(1, 2))
    nulls = dict.fromkeys(API["json_schemas"]["iteration_stats"])
    assert iteration_stats(nulls).kv_cache_stats.max_num_blocks == 0
    assert arguments_of("aggregated")["enable_iter_perf_stats"] is True
    published = merge(list(forced({}, publish_kv_events=True))).arguments
    assert published["kv_cache_config"]["event_buffer_max_size"] > 0
    assert problems({"kv_cache_config": {"event_buffer_max_size": 1, "enable_block_reuse": False}})


async def test_gotcha_13_a_request_error_is_one_requests_and_any_other_the_engines_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "HEALTH_SECONDS", 0.05)
    async with running(folder) as engine:
        other = engine.generate(request(request_id="other", max_tokens=4000))
        assert (await anext(other)).token_ids
        for responses, kind in ((0, EngineFailure), (2, EngineFailure)):
            faults().request_error, faults().request_error_after = "this one", responses
            with pytest.raises(kind, match="this one"):
                await tokens(engine, request(request_id=str(responses)))
            await until(lambda: engine._probe is not None and engine._probe.done())  # or it would meet the next fault
        assert engine.healthy and (await anext(other)).token_ids
        found("tensorrt_llm._test").kill_executors(OSError("CUDA error"))
        with pytest.raises(EngineDied, match="CUDA error"):
            _ = [delta async for delta in other]
        assert not engine.healthy
        with pytest.raises(EngineNotReady):
            await tokens(engine, request())
    async with running(folder) as idle:
        found("tensorrt_llm._test").kill_executors(OSError("CUDA error"))
        await until(lambda: not idle.healthy)


class Forces:
    """A processor that allows the token 42 alone. It keeps state, which its copy in a worker has for itself."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, token_ids: Any, logits: Any) -> None:
        self.lengths.append(len(token_ids))
        logits[:42], logits[43:] = -1e9, -1e9


class Fails:
    def __call__(self, token_ids: Any, logits: Any) -> None:
        logits[:] = 0.0
        raise ValueError("no")


async def test_gotcha_14_processors_are_called_by_position_and_pickled(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # noqa: PLC0415 - the other tests here do without

    monkeypatch.setenv("FAKE_TRTLLM_ENGINE", "embedded")
    monkeypatch.setenv(
        "FAKE_TRTLLM_CONFIG", json.dumps({"threads": 1, "device": "cpu", "dtype": "float32", "num_blocks": 64})
    )
    with registered(forces=Forces, fails=Fails):
        async with running(tiny_model, disable_overlap_scheduler=True) as engine:
            assert await tokens(engine, request(ignore_eos=True, processors=("forces",))) == [42] * 6
            plain = await tokens(engine, request(ignore_eos=True))
            assert await tokens(engine, request(ignore_eos=True, processors=("fails",))) == plain != [42] * 6
        edits = Edits(request(processors=("forces",)).sampling, (2,), 3)
        made = library.sampling_params(SamplingParams(max_tokens=1), FACTS, edits=edits).logits_processor
        copied = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
        assert len(inspect.signature(copied).parameters) == 5
        scores = torch.zeros(1, 1, 64)
        copied(7, scores, [[1, 2, 3]], None, None)
        assert scores.argmax().item() == 42 and scores.min() == -1e9
        assert not [
            name for name, source in SOURCES.items() if re.search("BatchedLogitsProcessor|apply_batched", source)
        ]


async def test_gotcha_15_the_async_llm_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs Ray. The plain one is made with keywords only, its model among them."""
    made: list[Any] = []
    original = found("tensorrt_llm.LLM").__init__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append((args, kwargs))
        original(self, *args, **kwargs)

    monkeypatch.setattr(found("tensorrt_llm.LLM"), "__init__", construct)
    async with running(folder):
        ((args, kwargs),) = made
        assert args == () and kwargs["model"] == str(folder) and "orchestrator_type" not in kwargs
    assert not [path for path in PRODUCT if "AsyncLLM" in path.read_text(encoding="utf-8")]


def test_gotcha_16_its_parsers_are_not_used() -> None:
    """Our server parses reasoning and tool calls.

    No spelling of a parser's name ever reaches the engine from our settings.
    """
    for role in ("aggregated", "prefill", "decode", "encode"):
        assert not {"reasoning_parser", "tool_parser"} & arguments_of(role).keys()
    assert problems({"tool_parser": "qwen3"}) == ["tool_parser: TensorRT-LLM 1.2.1 has no such argument"]
    assert not [path for path in PRODUCT if "tensorrt_llm.serve" in path.read_text(encoding="utf-8")]
