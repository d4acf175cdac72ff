"""Prefill, decode and encode on TensorRT-LLM's stand-in, with handoffs between engines."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoints.facts import ModelFacts
from engine.config import FakeConfig, TrtllmConfig, TrtllmEncoderConfig
from engine.errors import EngineDied, EngineFailure, EngineUnavailable, InvalidRequest
from engine.fake.engine import FakeEngine
from engine.kit import handoff
from engine.media import Encoding
from engine.transfer.process_id import shared_memory_domain
from engine.trtllm import disaggregation, library
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.engine import TrtllmEngine
from engine.trtllm.versions import version_of
from engine.types import Delta, GenerateRequest, Guide, Handoff, Logprob, SamplingParams
from tests.support.trtllm import BOTH_VERSIONS, NEWEST, found, handed_over, picture, travelled, trt  # noqa: F401 - a fixture for every test here
from tests.support.waiting import until

pytestmark = BOTH_VERSIONS
PROMPT = tuple(range(10, 80))
VERSION = version_of("1.2.1")
TRANSCEIVER = {"cache_transceiver_config": {"backend": "DEFAULT"}}


@pytest.fixture(autouse=True)
def folder(trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """Where the engines find their model's config.json."""
    config = {"vocab_size": 512, "max_position_embeddings": 32768, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def idle(engine: TrtllmEngine) -> None:
    """Wait until nothing runs in the engine."""
    await asyncio.sleep(0.02)  # what was begun a moment ago is under way
    async with asyncio.timeout(20):
        while engine.running:  # noqa: ASYNC110 - the engine has no signal for it
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def engine(role: Any) -> AsyncIterator[TrtllmEngine]:
    arguments = (
        TRANSCEIVER
        | ({"disable_overlap_scheduler": True} if role == "prefill" else {})
        | {"enable_iter_perf_stats": True}
    )
    running = TrtllmEngine(TrtllmConfig(model=".", arguments=arguments))
    await running.start()
    try:
        yield running
    finally:
        await running.close()


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[TrtllmEngine, TrtllmEngine]]:
    async with engine("prefill") as prefill, engine("decode") as decode:
        yield prefill, decode


def request(request_id: str = "r", **sampling: Any) -> GenerateRequest:
    parameters = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling})
    return GenerateRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=parameters)


async def all_of(stream: Any) -> list[Delta]:
    return [delta async for delta in stream]


def changed(handed: Handoff, **fields: Any) -> Handoff:
    """The handoff with other fields in its state."""
    state = msgspec.msgpack.decode(handed.state) | fields
    return msgspec.structs.replace(handed, state=msgspec.msgpack.encode(state))


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def expected(wanted: GenerateRequest) -> list[Delta]:
    """The answer of a single engine to the same request."""
    alone = FakeEngine(FakeConfig())
    await alone.start()
    try:
        return await all_of(alone.generate(wanted))
    finally:
        await alone.close()


async def test_prefill_and_decode_give_what_one_engine_gives() -> None:
    async with pair() as (prefill, decode):
        handed = await handed_over(prefill, request())
        travelled = handoff.decode_handoff(handoff.encode(handed))
        assert travelled == handed
        rest = await all_of(decode.generate(msgspec.structs.replace(request(), handoff=travelled)))
    whole = await expected(request())
    assert handed.first.prompt is not None and handed.first.finish_reason is None and len(handed.first.token_ids) == 1
    assert tokens([handed.first, *rest]) == tokens(whole)
    assert rest[-1].finish_reason == "length" and all(delta.prompt is None for delta in rest)


@pytest.mark.parametrize("count", [0, 3])
async def test_log_probabilities_after_a_handoff_are_right(trt: Any, count: int) -> None:  # noqa: F811
    """1.2.1's generation worker is one log-probability short, and asserts that it is not: decode computes the prompt
    again. Main's takes the one that is handed over.
    """
    async with pair() as (prefill, decode):
        assert decode.info.handoff_logprobs == (trt.__version__ == NEWEST)
        wanted = request(logprobs=count)
        handed = await handed_over(prefill, wanted)
        rest = await all_of(decode.generate(msgspec.structs.replace(wanted, handoff=handed)))
        alone = msgspec.structs.replace(
            request(logprobs=count, max_tokens=11), prompt_token_ids=(*PROMPT, *handed.first.token_ids)
        )
        whole = (await expected(wanted))[1:] if decode.info.handoff_logprobs else await expected(alone)
        assert tokens(rest) == tokens(whole) and rest[-1].finish_reason == "length"
        assert all(delta.prompt is None for delta in rest)
        assert [entry for delta in rest for entry in delta.logprobs] == [
            entry for delta in whole for entry in delta.logprobs
        ]
        assert decode.healthy


async def test_an_error_of_one_request_does_not_end_an_engine_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its type: what a generation worker that is short of log-probabilities raises, for example."""
    monkeypatch.setattr(TrtllmEngine, "_is_lost", lambda self, wanted: False)
    async with pair() as (prefill, decode):
        other = decode.generate(request("other", max_tokens=4000))
        assert (await anext(other)).token_ids
        handed = changed(await handed_over(prefill, request(logprobs=3, max_tokens=4000)), first_gen_log_probs=None)
        with pytest.raises(EngineFailure, match="AssertionError"):
            await all_of(decode.generate(msgspec.structs.replace(request(logprobs=3, max_tokens=4000), handoff=handed)))
        await until(lambda: len(decode.llm._executor.jobs) == 1)
        assert decode.healthy and (await anext(other)).token_ids


async def test_without_its_blocks_a_handoff_with_a_guide_cannot_go_on() -> None:
    async with pair() as (prefill, decode):
        handed = msgspec.structs.replace(await handed_over(prefill, request()), state=b"")
        guided = request(guide=Guide("regex", "a"))
        decode._info = msgspec.structs.replace(decode.info, guides=("regex",))
        with pytest.raises(InvalidRequest, match="with a guide cannot go on alone") as caught:
            await all_of(decode.generate(msgspec.structs.replace(guided, handoff=handed)))
        assert caught.value.param == "handoff"


async def test_a_request_for_one_token_leaves_nothing_to_decode() -> None:
    async with engine("prefill") as prefill:
        handed = await handed_over(prefill, request(max_tokens=1))
    assert handed.first.finish_reason == "length" and handed.state == b"" and len(handed.first.token_ids) == 1


async def test_an_end_at_the_first_token_leaves_nothing_to_decode() -> None:
    first = tokens(await expected(request()))[0]
    async with engine("prefill") as prefill:
        handed = await handed_over(prefill, request(stop_token_ids=(first,)))
    assert (handed.first.finish_reason, handed.first.stop_reason, handed.state) == ("stop", first, b"")


async def test_decode_computes_a_prompt_without_a_handoff_itself() -> None:
    """As it has to for short prompts, without a prefill replica, and for the canary."""
    async with engine("decode") as decode:
        assert tokens(await all_of(decode.generate(request()))) == tokens(await expected(request()))


async def test_a_handoff_of_another_engine_or_prompt_is_refused() -> None:
    async with pair() as (prefill, decode):
        handed = await handed_over(prefill, request())
        other = msgspec.structs.replace(handed, backend="embedded")
        with pytest.raises(InvalidRequest, match="embedded"):
            await all_of(decode.generate(msgspec.structs.replace(request(), handoff=other)))
        broken = msgspec.structs.replace(handed, state=b"\xc1")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await all_of(decode.generate(msgspec.structs.replace(request(), handoff=broken)))
        elsewhere = msgspec.structs.replace(request(), handoff=handed, prompt_token_ids=(1, 2, 3))
        with pytest.raises(EngineUnavailable, match="kv cache transfer") as caught:
            await all_of(decode.generate(elsewhere))
        assert type(caught.value) is EngineUnavailable and decode.healthy, "so that decode computes the prompt itself"


async def test_an_abort_on_decode_waits_for_the_transfer() -> None:
    """Before the first response there is no abort in the engine; at the first one there is."""
    async with pair() as (prefill, decode):
        handed = await handed_over(prefill, request(max_tokens=500))
        aborts: list[int] = []
        result_class = found("tensorrt_llm.executor.result").GenerationResult
        original = result_class.abort

        def abort(self: Any) -> None:
            aborts.append(len(self.outputs[0].token_ids))
            original(self)

        result_class.abort = abort
        try:
            stream = decode.generate(msgspec.structs.replace(request(max_tokens=500), handoff=handed))
            await stream.aclose()
            assert aborts == []
            await idle(decode)
        finally:
            result_class.abort = original
        assert len(aborts) == 1 and aborts[0] > 0


async def test_a_cancelled_prefill_is_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "FAKE_TRTLLM_CONFIG", json.dumps({"token_delay": 0.3})
    )  # it cannot be over before it is cancelled
    async with engine("prefill") as prefill:
        task = asyncio.create_task(handed_over(prefill, request()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(prefill)
        assert prefill.aborted == 1


async def test_an_engine_without_a_transceiver_says_so() -> None:
    running = TrtllmEngine(TrtllmConfig(model=".", arguments={"disable_overlap_scheduler": True}))
    await running.start()
    try:
        with pytest.raises(InvalidRequest, match="cache_transceiver_config"):
            await handed_over(running, request())
        handed = Handoff(version=1, backend="trtllm", first=Delta((10,)), state=b"state")
        with pytest.raises(InvalidRequest, match="cache_transceiver_config") as caught:
            await all_of(running.generate(msgspec.structs.replace(request(), handoff=handed)))
        assert caught.value.param == "handoff" and running.healthy
        assert tokens(await all_of(running.generate(request()))) == tokens(await expected(request()))
    finally:
        await running.close()


async def test_prefill_under_the_overlap_scheduler_is_refused_where_it_would_end_the_worker(trt: Any) -> None:  # noqa: F811
    async with TrtllmEngine(TrtllmConfig(model=".", arguments=dict(TRANSCEIVER))) as running:
        if trt.__version__ == NEWEST:
            assert (await handed_over(running, request())).state
        else:
            with pytest.raises(InvalidRequest, match="disable_overlap_scheduler"):
                await handed_over(running, request())
        assert running.healthy


async def test_images_encoded_elsewhere_reach_prefill_and_not_decode() -> None:
    """Handles are used up at prefill; what decode needs of them are the hashes."""
    encoder = TrtllmEncoder(TrtllmEncoderConfig(model=".", arguments={"max_batch_size": 1}))
    await encoder.start()
    try:
        assert encoder.healthy
        encoding = await encoder.encode([picture()], "<image>")
        assert travelled(encoding) == encoding
        keywords = disaggregation.context_keywords(encoding, VERSION)
        assert keywords["request_type"] == "context_only" and len(keywords["multimodal_hashes"]) == 1
        params = found("tensorrt_llm.llmapi.DisaggregatedParams")(
            **(keywords | {"ctx_request_id": 7, "first_gen_tokens": [3], "opaque_state": b"\x00\xff"})
        )
        result = _Result(params, (1, 2, 3))
        asked = msgspec.structs.replace(request(), media=encoding)
        handed = handoff.handoff_of(
            "trtllm", disaggregation.held_of(result, Delta((3,), finish_reason="length"), asked, VERSION)
        )
        assert handed.prompt_token_ids == (1, 2, 3)
        generation = disaggregation.generation_keywords(handed, VERSION, Logprob)
        assert "multimodal_embedding_handles" not in generation
        assert (
            generation["multimodal_hashes"] == keywords["multimodal_hashes"]
            and generation["opaque_state"] == b"\x00\xff"
        )
        assert disaggregation.local_keywords(encoding)["request_type"] == "context_and_generation"
    finally:
        await encoder.close()
    assert not encoder.healthy


def test_handles_wrapped_in_a_tuple_are_unwrapped() -> None:
    params = found("tensorrt_llm.llmapi.DisaggregatedParams")(multimodal_embedding_handles=[{"method_key": 2}])
    params.multimodal_embedding_handles = ([{"method_key": 2}],)
    encoding = disaggregation.encoding_of(_Result(params, ()), "<image>")
    assert disaggregation.context_keywords(encoding, VERSION)["multimodal_embedding_handles"] == [{"method_key": 2}]


def handles_of(encoding: Encoding) -> tuple[Any, Any]:
    keywords = disaggregation.context_keywords(encoding, VERSION)
    found("tensorrt_llm.llmapi.DisaggregatedParams")(**keywords)
    return keywords["multimodal_embedding_handles"], keywords.get("multimodal_hashes")


def test_each_image_has_its_own_handle_where_the_version_has_them() -> None:
    """Of two images there is one `mm_embedding_handle`.

    A handle for both goes without hashes, of which 1.2.1 wants as many as handles.
    """
    first, second, hashes = {"method_key": 1}, {"method_key": 2}, [[1] * 8, [2] * 8]
    make = found("tensorrt_llm.llmapi.DisaggregatedParams")
    both = make(multimodal_embedding_handles=[first, second], multimodal_hashes=hashes)
    assert handles_of(disaggregation.encoding_of(_Result(both, (), first), "")) == ([first, second], hashes)
    for params in (make(), None):
        assert handles_of(disaggregation.encoding_of(_Result(params, (), second), "")) == ([second], None)
    shared = make()
    shared.multimodal_embedding_handles, shared.multimodal_hashes = [first], hashes
    assert handles_of(disaggregation.encoding_of(_Result(shared, (), first), "")) == ([first], None)


def test_results_without_a_context_for_the_handoff_are_failures() -> None:
    empty = found("tensorrt_llm.llmapi.DisaggregatedParams")()
    without_a_token = found("tensorrt_llm.llmapi.DisaggregatedParams")(ctx_request_id=7, opaque_state=b"state")
    without_an_id = found("tensorrt_llm.llmapi.DisaggregatedParams")(first_gen_tokens=[1], opaque_state=b"state")
    for params in (None, empty, without_a_token, without_an_id):
        with pytest.raises(EngineFailure, match="transceiver"):
            disaggregation.held_of(_Result(params, ()), Delta((1,), finish_reason="length"), request(), VERSION)
    with pytest.raises(EngineFailure, match="no embeddings"):
        disaggregation.encoding_of(_Result(empty, ()), "")


def test_every_field_of_disaggregated_params_has_its_place(trt: Any) -> None:  # noqa: F811
    """A field that a later version adds is noticed here: neither side may lose it in silence."""
    theirs = {field.name for field in fields(found("tensorrt_llm.llmapi.DisaggregatedParams"))}
    ours = {*disaggregation.ContextState.__struct_fields__, *disaggregation.EncoderState.__struct_fields__}
    assert theirs - {"request_type", "first_gen_logits"} <= ours - {"package", "memory", "others"}
    assert trt.__version__ != NEWEST or theirs == ours - {"package", "memory", "others"} | {
        "request_type",
        "first_gen_logits",
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (handoff.encode(Handoff(version=2, backend="trtllm", first=Delta(()))), "version 2"),
        (b"", "cannot be read"),
        (b"\x80", "cannot be read"),
        (b"\x93\x01", "cannot be read"),
        (handoff.encode(Encoding(version=1, backend="trtllm", prompt="", state=b"")), "cannot be read"),
    ],
)
def test_malformed_handoffs_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        handoff.decode_handoff(data)
    assert caught.value.param == "handoff"


def test_a_handoff_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_BYTES", 10)
    with pytest.raises(InvalidRequest, match="the most is 10"):
        handoff.decode_handoff(bytes(11))


class _Result:
    def __init__(self, params: Any, prompt: tuple[int, ...], handle: Any = None) -> None:
        self.disaggregated_params = params
        self.mm_embedding_handle = handle
        self.prompt_token_ids = list(prompt)
        self.outputs = [self]


async def test_a_handoff_of_another_version_is_computed_again_and_says_so(trt: Any) -> None:  # noqa: F811
    async with pair() as (prefill, decode):
        handed = changed(await handed_over(prefill, request()), package="1.9.0")
        with pytest.raises(InvalidRequest, match=r"of TensorRT-LLM 1\.9\.0; this replica runs 1\.") as caught:
            await all_of(decode.generate(msgspec.structs.replace(request(), handoff=handed)))
        assert caught.value.param == "handoff", "which has the decode replica compute it"
        lost = msgspec.structs.replace(request(), handoff=msgspec.structs.replace(handed, state=b""))
        assert len(tokens(await all_of(decode.generate(lost)))) == 11
        assert prefill.info.kv_layout == f"TensorRT-LLM {trt.__version__}", "so that such replicas do not pair"


@dataclass(kw_only=True)
class LaterParams:
    """DisaggregatedParams of a version that is not known here."""

    request_type: str = "context_only"
    ctx_request_id: int = 7
    first_gen_tokens: tuple[int, ...] = (3,)
    first_gen_logits: Any = None
    multimodal_embedding_handles: Any = None
    a_new_name: Any = None
    another: Any = None
    locked: bool = field(default=True, init=False)


def test_fields_that_are_not_known_here_are_carried_by_name() -> None:
    params = LaterParams(a_new_name={"deep": [1, b"\x00", "x"]}, first_gen_logits=object())
    held = disaggregation.held_of(_Result(params, ()), Delta((3,), finish_reason="length"), request(), VERSION)
    handed = handoff.decode_handoff(handoff.encode(handoff.handoff_of("trtllm", held)))
    keywords = disaggregation.generation_keywords(handed, VERSION, Logprob)
    assert keywords == {
        "request_type": "generation_only", "ctx_request_id": 7, "first_gen_tokens": [3],
        "a_new_name": {"deep": [1, b"\x00", "x"]},
    }  # fmt: skip
    for others in ({"request_type": "context_only"}, {"multimodal_embedding_handles": [{}]}, {"ctx_request_id": 1}):
        with pytest.raises(InvalidRequest, match=next(iter(others))):
            disaggregation.generation_keywords(changed(handed, others=others), VERSION, Logprob)


def test_a_handoff_that_cannot_be_encoded_fails_at_prefill() -> None:
    with pytest.raises(EngineFailure, match="hands over what cannot be sent"):
        disaggregation.held_of(
            _Result(LaterParams(another=object()), ()), Delta((3,), finish_reason="length"), request(), VERSION
        )


@pytest.mark.parametrize(
    ("name", "newest"),
    [
        ("1.2.1", False),
        ("1.2.1.post1", False),
        ("1.3.0rc22", True),
        ("1.10.0", True),
        ("2.0", True),
        ("main", False),
    ],
)
def test_the_version_decides(name: str, newest: bool) -> None:
    version = version_of(name)
    assert (version.name, version.handoff_logprobs, version.request_ids, version.zero_logprobs) == (name, *[newest] * 3)


async def test_log_probabilities_of_prompts_are_right_or_refused(trt: Any) -> None:  # noqa: F811
    """1.2.1 has the most likely tokens alone; no version has those of reused blocks."""
    async with engine("aggregated") as running:
        assert running.info.prompt_logprobs == (trt.__version__ == NEWEST)
        for _ in range(2):
            if trt.__version__ != NEWEST:
                with pytest.raises(InvalidRequest, match=r"TensorRT-LLM 1\.2\.1, has no log-probabilities of prompts"):
                    await all_of(running.generate(request(prompt_logprobs=2)))
            else:
                (report,) = [delta.prompt for delta in await all_of(running.generate(request(prompt_logprobs=2)))][:1]
                (whole,) = [delta.prompt for delta in await expected(request(prompt_logprobs=2))][:1]
                assert report is not None and whole is not None and report.logprobs == whole.logprobs
        plain = [await all_of(running.generate(request())) for _ in range(2)][1][0].prompt
        assert plain is not None and plain.cached_tokens == 64, "others share their blocks"


states = st.dictionaries(
    st.sampled_from(sorted(disaggregation.ContextState.__struct_fields__)) | st.text(max_size=9),
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.sampled_from(["1.2.1", "1.3.0rc22", shared_memory_domain()])
    | st.lists(st.integers(-1, 9) | st.lists(st.integers(0, 9), max_size=3), max_size=3)
    | st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=2),
    max_size=6,
)
plausible = st.fixed_dictionaries(
    {"package": st.just("1.2.1"), "ctx_request_id": st.just(7), "first_gen_tokens": st.just([3])}
)


@given(
    st.binary(max_size=60)
    | states.map(msgspec.msgpack.encode)
    | st.tuples(plausible, states).map(lambda both: msgspec.msgpack.encode({**both[1], **both[0]}))
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_handoff_or_a_clear_error(trt: Any, data: bytes) -> None:  # noqa: F811
    """Nothing in them is run: what comes through are parameters of plain data."""
    handed = Handoff(version=1, backend="trtllm", first=Delta((3,)), state=data)
    facts = ModelFacts({"vocab_size": 64, "max_position_embeddings": 512, "eos_token_id": 2})
    for each in (handed, Encoding(version=1, backend="trtllm", prompt="", state=data)):
        carried = {"handoff": each} if isinstance(each, Handoff) else {"media": each}
        try:
            made = library.submit(
                SimpleNamespace(generate_async=dict, _check_health=lambda: True),
                msgspec.structs.replace(request(), **carried),
                facts,
            )["disaggregated_params"]
        except (EngineUnavailable, InvalidRequest) as error:
            assert str(error) and not isinstance(error, EngineDied)
        else:
            assert made.ctx_request_id == 7 or made.multimodal_embedding_handles
            assert msgspec.msgpack.encode([getattr(made, each.name) for each in fields(made)])
