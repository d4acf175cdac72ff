"""Every keyword and value that the adapter's builders make for TensorRT-LLM is in its contract.

This holds for any request and settings.
"""

import ast
import functools
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as testing
from hypothesis import strategies as st
from pydantic import TypeAdapter

from engine.checkpoints.facts import ModelFacts
from engine.errors import InvalidRequest
from engine.kit import handoff, logits
from engine.kv_events import Created, Removed, Stored, Updated
from engine.media import Encoding, MediaFiles, MediaInput
from engine.stats import InflightBatchingStats, KvCacheStats
from engine.transfer.process_id import shared_memory_domain
from engine.trtllm import library
from engine.trtllm.arguments import problems
from engine.trtllm.disaggregation import (
    BACKEND,
    ContextState,
    EncoderState,
    context_keywords,
    generation_keywords,
    local_keywords,
)
from engine.trtllm.support import Support
from engine.trtllm.versions import version_of
from engine.types import Delta, GenerateRequest, Guide, Handoff, Logprob, SamplingParams
from server.compose.engine_args import effective
from server.settings import read_settings
from tests.support.trtllm import found, trt  # noqa: F401 - a fixture
from tests.support.trtllm_contract_api import API, ATTRIBUTES, constructor, kind_of, signature

ROOT = Path(__file__).resolve().parents[3]
VERSION = version_of("1.2.1")
FACTS = ModelFacts({"vocab_size": 64, "max_position_embeddings": 512, "eos_token_id": [2, 7]})


class Processor:
    def __call__(self, token_ids: Any, logits: Any) -> None: ...


numbers = st.integers(3, 20)
FIELDS = {
    "max_tokens": numbers | st.just(0),
    "min_tokens": st.sampled_from([0, 3]),
    "temperature": st.sampled_from([0.0, 0.7, 1.0]),
    "top_p": st.sampled_from([0.5, 1.0]),
    "top_k": st.sampled_from([0, 5]),
    "min_p": st.sampled_from([0.0, 0.1]),
    "repetition_penalty": st.sampled_from([1.0, 1.2]),
    "presence_penalty": st.sampled_from([0.0, -1.0]),
    "frequency_penalty": st.sampled_from([0.0, 1.5]),
    "logit_bias": st.dictionaries(numbers, st.floats(-100, 100), max_size=2),
    "allowed_token_ids": st.lists(numbers, max_size=2).map(tuple),
    "bad_words": st.lists(st.lists(numbers, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),
    "seed": st.none() | numbers,
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(numbers, max_size=2).map(tuple),
    "logprobs": st.none() | st.integers(0, 3),
    "prompt_logprobs": st.none() | st.integers(0, 3),
    "guide": st.sampled_from(
        [None, *itertools.starmap(Guide, [("json_schema", "{}"), ("json_object",), ("regex", "a"), ("grammar", "b")])]
    )
    | st.just(Guide("choice", '["a"]')),
    "processors": st.sampled_from([(), ("contract-test",)]),
    "reasoning_budget": st.none(),  # refused before, or kept by a processor of ours
}
samplings = st.fixed_dictionaries(FIELDS).map(lambda fields: SamplingParams(**fields))
handles = st.just({"method_key": 2})
hashes = st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=2, max_size=2)
contexts = st.builds(
    ContextState,
    package=st.just("1.2.1"),
    memory=st.just(shared_memory_domain()),
    ctx_request_id=numbers,
    first_gen_tokens=st.lists(numbers, min_size=1, max_size=2),
    opaque_state=st.none() | st.binary(max_size=9),
    draft_tokens=st.none() | st.lists(numbers),
    multimodal_hashes=st.none() | hashes,
    mrope_position_ids_handle=st.none() | handles,
    mrope_position_deltas_handle=st.none() | handles,
)
encodings = st.builds(
    EncoderState,
    memory=st.just(shared_memory_domain()),
    multimodal_embedding_handles=st.lists(handles, min_size=2, max_size=2),
    multimodal_hashes=st.none() | hashes,
    mrope_position_ids_handle=st.none() | handles,
    mrope_position_deltas_handle=st.none() | handles,
)
thorough = testing(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@functools.cache
def adapters(name: str) -> dict[str, TypeAdapter[Any]]:
    """Types of the fields of a dataclass of the contract.

    Fields whose types are TensorRT-LLM's or torch's classes are left out.
    """
    parse = found("tensorrt_llm._contract").parse_type
    texts = {field: text.split(" (")[0] for field, text in ATTRIBUTES[name].items()}
    plain = {
        field: text
        for field, text in texts.items()
        if kind_of(text) is None and "torch" not in text and "Processor" not in text
    }
    names = {"BaseModel": dict, "AdditionalModelOutput": Any}
    fields = [field for field in plain if field in constructor(name).parameters and "lookahead" not in field]
    return {field: TypeAdapter(parse(plain[field], names)) for field in fields}


def assert_valid(value: Any, name: str) -> None:
    for field, adapter in adapters(name).items():
        adapter.validate_python(getattr(value, field), strict=True)


def test_every_field_of_a_request_is_tried() -> None:
    assert FIELDS.keys() == set(SamplingParams.__struct_fields__)


@pytest.fixture
def processor() -> Any:
    logits.register("contract-test", Processor)
    yield
    logits.unregister("contract-test")


IGNORED: dict[str, tuple[str, ...]] = {
    "TorchSampler": ("repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_p", "bad_token_ids"),
    "TRTLLMSampler": ("bad_token_ids",),
}
"""What 1.2.1's samplers ignore, or are not asked for since a bias does it."""


@thorough
@given(samplings, st.sampled_from([(), (2,), (2, 7)]), st.sampled_from(list(IGNORED)), st.booleans())
def test_sampling_params_of_any_request(
    processor: Any, sampling: SamplingParams, ends: tuple[int, ...], sampler: str, processors: bool
) -> None:
    """A request is refused by the name of a field, or made of what the sampler honours."""
    support = Support({"sampler_type": sampler, "disable_overlap_scheduler": True}, processors=processors)
    try:
        native, edits = support.split(sampling, ends, 3)
    except InvalidRequest as error:
        assert error.param in FIELDS and getattr(sampling, error.param) != getattr(
            SamplingParams(max_tokens=1), error.param
        )
        return
    facts = ModelFacts({**FACTS.config, "eos_token_id": list(ends)})
    made = library.sampling_params(native, facts, edits=edits, num_prompt=3)
    without_effect = {"seed", "min_p"} if sampling.temperature == 0 else set()
    assert [name for name in IGNORED[sampler] if getattr(made, name) is not None and name not in without_effect] == []
    assert (made.logits_processor is None) == (edits is None)
    assert isinstance(made, found("tensorrt_llm.SamplingParams"))
    assert_valid(made, "SamplingParams")
    if made.guided_decoding is not None:
        assert_valid(made.guided_decoding, "GuidedDecodingParams")
    if made.embedding_bias is not None:
        assert tuple(made.embedding_bias.shape) == (64,) and str(made.embedding_bias.dtype) == "torch.float32"


@thorough
@given(contexts, encodings)
def test_disaggregated_params_of_any_handoff(context: ContextState, encoder: EncoderState) -> None:
    handed = Handoff(version=handoff.VERSION, backend=BACKEND, first=Delta((1,)), state=msgspec.msgpack.encode(context))
    encoding = Encoding(version=handoff.VERSION, backend=BACKEND, prompt="", state=msgspec.msgpack.encode(encoder))
    for keywords in (
        context_keywords(None, VERSION),
        context_keywords(encoding, VERSION),
        local_keywords(encoding),
        generation_keywords(handed, VERSION, Logprob),
    ):
        constructor("DisaggregatedParams").bind(**keywords)
        made = found("tensorrt_llm.llmapi.DisaggregatedParams")(**keywords)
        assert made.request_type in API["enums"]["request_type"]["members"]
        assert_valid(made, "DisaggregatedParams")


def fields_unknown_to(model: str, values: dict[str, Any], path: str = "") -> list[str]:
    """Dotted names that the contract's model lacks."""
    lacking = []
    for name, value in values.items():
        text = ATTRIBUTES[model].get(name)
        nested = None if text is None else kind_of(text)
        if text is None:
            lacking.append(f"{path}{name}")
        elif isinstance(value, dict) and nested is not None:
            lacking += fields_unknown_to(nested.name, value, f"{path}{name}.")
    return lacking


SETTINGS = [
    "--dtype=bfloat16", "--max-seq-len=4096", "--max-batch-size=8", "--max-num-tokens=512",
    "--enable-chunked-prefill=false",
    "--tensor-parallel-size=2", "--pipeline-parallel-size=2", "--expert-parallel-size=2", "--enable-attention-dp=true",
    "--gpus-per-node=4", "--guided-decoding-backend=llguidance", "--trust-remote-code=true", "--kv-block-size=64",
    "--enable-block-reuse=true", "--free-gpu-memory-fraction=0.5", "--load-format=dummy", "--enable-cuda-graphs=false",
]  # fmt: skip


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode", "encode"])
@pytest.mark.parametrize("publishing", [False, True])
@pytest.mark.parametrize("flags", [[], SETTINGS])
def test_arguments_of_any_settings(
    role: str, publishing: bool, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_GPUS", "4")
    flags = [*flags, "--disaggregation-mode", role, "--publish-kv-events", str(publishing)]
    arguments = effective(read_settings(["--engine", "trtllm", *flags])).arguments
    pruned = effective(read_settings(["--engine", "trtllm", *flags, "--backend", "_autodeploy"])).arguments
    assert problems(arguments) == []
    for taken in (arguments, pruned):
        assert fields_unknown_to("TorchLlmArgs", taken) == []
    name = "MultimodalEncoder" if role == "encode" else "LLM"
    constructor(name).bind(**{**arguments, "model": "."})
    found(f"tensorrt_llm.llmapi.{name}")(**{**arguments, "model": "."}).shutdown()


@pytest.mark.parametrize("context_only", [False, True])
@pytest.mark.parametrize("source", ["prompt", "encoding", "media", "handoff", "expanded"])
def test_arguments_with_which_requests_are_submitted(context_only: bool, source: str) -> None:
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=4), cache_salt="salt"
    )
    state = msgspec.msgpack.encode(EncoderState([{"method_key": 2}], memory=shared_memory_domain()))
    context = msgspec.msgpack.encode(ContextState("1.2.1", 1, [5]))
    carried = {
        "prompt": {},
        "encoding": {"media": Encoding(version=1, backend=BACKEND, prompt="<image>", state=state)},
        "media": {"media": MediaFiles("<image>", (MediaInput(b"file"),))},
        "handoff": {"handoff": Handoff(version=1, backend=BACKEND, first=Delta((5,)), state=context)},
        "expanded": {
            "handoff": Handoff(version=1, backend=BACKEND, first=Delta((5,)), state=context, prompt_token_ids=(3, 3, 3))
        },
    }[source]
    asked, images = msgspec.structs.replace(request, **carried), ["pixels"] if source == "media" else []
    keywords = library.submit(SimpleNamespace(generate_async=dict), asked, FACTS, images, context_only=context_only)
    signature("tensorrt_llm.LLM.generate_async", drop=1).bind(**keywords)
    inputs = keywords["inputs"]
    text = {"prompt": "<image>"}
    expected = {"encoding": text, "media": {**text, "multi_modal_data": {"image": ["pixels"]}}, "expanded": [3, 3, 3]}
    assert inputs == expected.get(source, [5, 6])
    assert isinstance(inputs, list) or inputs.keys() <= API["typed_dicts"]["TextPrompt"].keys()
    assert keywords["sampling_params"].add_special_tokens == isinstance(inputs, list), (
        "a text has those of its template"
    )
    assert (keywords["cache_salt"] == "salt") == (source in ("prompt", "handoff")) and keywords[
        "cache_salt"
    ].startswith("salt")
    assert keywords["streaming"] is not context_only
    assert (keywords["disaggregated_params"] is None) == (source in ("prompt", "media") and not context_only)


def test_media_are_submitted_under_the_keys_of_a_text_prompt() -> None:
    keywords = library.encode(SimpleNamespace(generate_async=dict), "<image>", ["pixels"])
    signature("tensorrt_llm.llmapi.MultimodalEncoder.generate_async", drop=1).bind(**keywords)
    assert keywords["inputs"] == {"prompt": "<image>", "multi_modal_data": {"image": ["pixels"]}}
    assert keywords["inputs"].keys() <= API["typed_dicts"]["TextPrompt"].keys()


def test_statistics_are_read_under_keys_that_there_are() -> None:
    schema = API["json_schemas"]["iteration_stats"]
    tree = ast.parse((ROOT / "engine" / "trtllm" / "polling.py").read_text(encoding="utf-8"))
    reader = next(
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "iteration_stats"
    )
    calls = [
        node
        for node in ast.walk(reader)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("raw.get", "_int")
    ]
    keys = {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    newer = {"attentionDpRank"}  # a row for each rank (#13199)
    assert len(keys) > 5 and keys - newer <= schema.keys() and not newer & schema.keys()
    for ours, key in ((KvCacheStats, "kvCacheStats"), (InflightBatchingStats, "inflightBatchingStats")):
        assert {field.encode_name for field in msgspec.structs.fields(ours)} <= schema[key].keys()


def test_events_have_the_fields_that_there_are() -> None:
    schemas = {schema["type"]: schema for schema in API["json_schemas"]["kv_cache_event"]["data"]["oneOf"]}
    for event in (Created, Stored, Removed, Updated):
        stated = schemas.pop(event.__struct_config__.tag)
        ours = {"cache_salt"} if event is Stored else set()
        assert set(event.__struct_fields__) - ours == stated.keys() - {"type"}
    assert schemas == {}


def test_the_processor_is_called_as_the_contract_says() -> None:
    from engine.trtllm.processors import ProcessorAdapter  # noqa: PLC0415 - needs torch

    stated = API["callables"]["tensorrt_llm.sampling_params.LogitsProcessor.__call__"]["params"]
    assert list(inspect.signature(ProcessorAdapter.__call__).parameters) == [param["name"] for param in stated]
