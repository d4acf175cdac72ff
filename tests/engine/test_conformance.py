"""Conformance of every engine that can run here with the contract of `engine/base.py`. Engines run in this process and
in another.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from engine.admission import AdmissionEngine
from engine.base import Engine
from engine.errors import (
    ContextOverflow,
    EngineFailure,
    EngineNotReady,
    EngineUnavailable,
    InvalidRequest,
    NotSupported,
)
from engine.kv_events import Created, Removed, Stored
from engine.types import Guide, ReasoningBudget
from tests.support.engine_cases import (
    BLOCK,
    CONTEXT,
    EOS,
    KINDS,
    NEWEST_KINDS,
    REAL,
    SPECULATING_KINDS,
    TIERED_KINDS,
    VOCABULARY,
    Answer,
    Subject,
    collect,
    compare,
    config_of,
    engine_of,
    exhaust,
    generate,
    idle,
    prompt_of,
    recorded,
    request_for,
    stored_chain,
    tokens_of,
)  # fmt: skip

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[*KINDS, *NEWEST_KINDS, *TIERED_KINDS, *SPECULATING_KINDS]
)
async def subject(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Subject]:
    """An engine for all tests. What it answered with drafts in any of them, it has to answer without, too, and with
    drafts of other kinds."""
    speculates, answers = request.param == "embedded-ngram", list[Answer]()
    async with engine_of(request.param, config_of(request.param, tiny_model)) as engine:
        await engine.start()
        if speculates:
            answers = recorded(engine)
        subject = Subject(engine)
        collecting = asyncio.create_task(subject.collect_events())
        yield subject
        await engine.close()
        await asyncio.wait_for(collecting, 20)
    if speculates:
        tests = sum(request.param in item.name for item in request.session.items)
        for kind in ("embedded", "embedded-suffix", "embedded-draft", "embedded-eagle3"):
            async with engine_of(kind, config_of(kind, tiny_model)) as other:
                await other.start()
                compared = await compare(answers, other)
            assert compared > 50 or tests < 50, "most tests have answers that can be compared"


@pytest.fixture
def engine(subject: Subject) -> Engine:
    return subject.engine


ONCE = [kind for kind in KINDS if kind in REAL or kind.startswith("fake")]
"""Every engine that computes, and every wrapper around the one that starts at once."""


@pytest.fixture(params=[*ONCE, *NEWEST_KINDS, *TIERED_KINDS, *SPECULATING_KINDS])
def fresh(request: pytest.FixtureRequest, tiny_model: Path) -> AbstractAsyncContextManager[Engine]:
    return engine_of(request.param, config_of(request.param, tiny_model))


async def test_deltas_begin_with_the_prompt_report_and_end_with_the_finish(engine: Engine) -> None:
    deltas = await generate(engine, request_for(prompt_of(20), max_tokens=30))
    assert [delta.prompt is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(tokens_of(deltas)) == 30
    assert all(delta.token_ids and not delta.logprobs and delta.stop_reason is None for delta in deltas)
    assert deltas[0].prompt is not None and deltas[0].prompt.logprobs is None and deltas[0].prompt.queue_seconds >= 0


@pytest.mark.parametrize("max_tokens", [1, 2, BLOCK, BLOCK + 1])
async def test_max_tokens(engine: Engine, max_tokens: int) -> None:
    deltas = await generate(engine, request_for(prompt_of(BLOCK), max_tokens=max_tokens))
    assert len(tokens_of(deltas)) == max_tokens


async def test_choices_of_one_request_wait_for_each_other_without_a_limit(engine: Engine) -> None:
    """Three times as many as the engine has places, with a limit that the second wave exceeds."""
    admission = AdmissionEngine(engine, max_queue_size=100, queue_timeout=0.001)
    prompt = prompt_of(BLOCK)
    requests = [replace(request_for(prompt, max_tokens=4), group="one") for _ in range(3 * engine.info.max_num_seqs)]
    answers = await asyncio.gather(*(generate(admission, request) for request in requests))
    assert [len(tokens_of(deltas)) for deltas in answers] == [4] * len(requests)
    first = answers[-1][0].prompt
    assert first is not None and first.queue_seconds > 0.001


async def test_max_tokens_of_zero_gives_the_prompt_alone(engine: Engine) -> None:
    asked = {"prompt_logprobs": 0} if engine.info.prompt_logprobs else {}
    deltas = await generate(engine, request_for(prompt_of(20), max_tokens=0, **asked))
    assert len(deltas) == 1 and deltas[0].token_ids == () and deltas[0].finish_reason == "length"
    assert deltas[0].prompt is not None and len(deltas[0].prompt.logprobs or ()) == (20 if asked else 0)


async def test_greedy_output_repeats(engine: Engine) -> None:
    request = request_for(prompt_of(20), max_tokens=20)
    assert tokens_of(await generate(engine, request)) == tokens_of(await generate(engine, request))


@pytest.mark.parametrize("kind", ["embedded", "embedded-ngram"])
async def test_a_seed_gives_the_same_text_beside_others_and_after_a_restart(kind: str, tiny_model: Path) -> None:
    asked = {"max_tokens": 24, "temperature": 1.0, "top_p": 0.95}
    prompt, texts = prompt_of(20), list[list[int]]()
    for others in (0, 5):
        async with engine_of(kind, config_of(kind, tiny_model)) as engine:
            await engine.start()
            seeded = [request_for(prompt, seed=seed, **asked) for seed in (7, 8)]
            beside = [request_for(prompt_of(30), **asked) for _ in range(others)]
            answers = await asyncio.gather(*(generate(engine, request) for request in (*seeded, *beside)))
            texts += [tokens_of(deltas) for deltas in answers[:2]]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]


async def test_stop_token_ids_end_the_sequence_and_are_reported(engine: Engine) -> None:
    prompt = prompt_of(20)
    free = tokens_of(await generate(engine, request_for(prompt, max_tokens=20)))
    stop = free[7]
    deltas = await generate(engine, request_for(prompt, max_tokens=20, stop_token_ids=(stop,)))
    assert tokens_of(deltas) == free[: free.index(stop) + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)


async def test_end_of_sequence_ends_unless_ignored(engine: Engine) -> None:
    prompt, only_eos = (EOS,) * 5, {EOS: 100.0}
    deltas = await generate(engine, request_for(prompt, ignore_eos=False, logit_bias=only_eos))
    assert tokens_of(deltas) == [EOS]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    deltas = await generate(engine, request_for(prompt, ignore_eos=True, logit_bias=only_eos))
    assert tokens_of(deltas) == [EOS] * 8
    assert deltas[-1].finish_reason == "length"


async def test_min_tokens_come_before_any_end(engine: Engine) -> None:
    prompt, only_eos = (EOS,) * 5, {EOS: 100.0}
    deltas = await generate(
        engine, request_for(prompt, min_tokens=5, max_tokens=20, ignore_eos=False, logit_bias=only_eos)
    )
    tokens = tokens_of(deltas)
    assert EOS not in tokens[:5] and tokens[5:] == [EOS]
    assert deltas[-1].finish_reason == "stop"


async def test_a_reset_forgets_what_is_cached(engine: Engine) -> None:
    request = request_for(prompt_of(4 * BLOCK))
    await generate(engine, request)
    before = await generate(engine, request)
    assert before[0].prompt is not None and before[0].prompt.cached_tokens == 3 * BLOCK
    if engine.info.backend == "trtllm":
        with pytest.raises(InvalidRequest, match="restart"):
            await engine.reset_prefix_cache()
        return
    await engine.reset_prefix_cache()
    after = await generate(engine, request)
    assert after[0].prompt is not None and after[0].prompt.cached_tokens == 0
    assert tokens_of(after) == tokens_of(before)


async def test_a_profile_is_a_trace_of_the_steps(engine: Engine, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    if engine.info.backend != "embedded":
        with pytest.raises(NotSupported, match="profile"):
            await engine.start_profile()
        with pytest.raises(NotSupported, match="profile"):
            await engine.stop_profile(str(trace))
        return
    with pytest.raises(InvalidRequest, match="no profile"):
        await engine.stop_profile(str(trace))
    await engine.start_profile()
    with pytest.raises(InvalidRequest, match="stop it first"):
        await engine.start_profile()
    await generate(engine, request_for(prompt_of(4), max_tokens=3))
    await engine.stop_profile(str(trace))
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "step" and event["ph"] == "X" for event in events) >= 3
    await engine.start_profile()
    with pytest.raises(EngineFailure, match="cannot be written"):
        await engine.stop_profile(str(tmp_path / "missing" / "trace.json"))


async def test_closing_frees_what_fifty_requests_hold(engine: Engine) -> None:
    before = await idle(engine)
    streams = [engine.generate(request_for(prompt_of(40), max_tokens=400)) for _ in range(50)]
    running = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(stream.aclose() for stream in streams))
    await asyncio.wait(running)
    after = await idle(engine, before)
    assert after.num_completed_requests < before.num_completed_requests + 5, "they ran to their end"
    for task, stream in zip(running, streams, strict=True):
        assert task.exception() is None or isinstance(task.exception(), StopAsyncIteration)
        assert [delta async for delta in stream] == []


async def test_cancelling_frees_what_fifty_requests_hold(engine: Engine) -> None:
    before = await idle(engine)
    streams = [engine.generate(request_for(prompt_of(40), max_tokens=400)) for _ in range(50)]
    await anext(streams[0])
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert (await idle(engine, before)).num_completed_requests < before.num_completed_requests + 5, (
        "they ran to their end"
    )
    assert len(tokens_of(await generate(engine, request_for(prompt_of(40))))) == 8


async def test_closing_a_finished_or_unread_stream_is_harmless(engine: Engine) -> None:
    stream = engine.generate(request_for(prompt_of(20)))
    async with aclosing(stream):
        assert [delta async for delta in stream][-1].finish_reason == "length"
    await stream.aclose()
    await engine.generate(request_for(prompt_of(20))).aclose()
    await idle(engine)


@pytest.mark.parametrize("prompt", [(), (VOCABULARY,)])
async def test_an_impossible_prompt_is_refused(engine: Engine, prompt: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await generate(engine, request_for(prompt))
    assert caught.value.param == "prompt"


async def test_a_guide_that_the_engine_lacks_is_refused(engine: Engine) -> None:
    if engine.info.guides:
        pytest.skip("this engine does guided decoding")
    with pytest.raises(InvalidRequest, match="json_object"):
        await generate(engine, request_for(prompt_of(5), guide=Guide("json_object")))


async def test_the_context_is_a_limit_to_the_token(engine: Engine) -> None:
    assert engine.info.context_length == CONTEXT
    deltas = await generate(engine, request_for(prompt_of(CONTEXT - 5), max_tokens=5))
    assert len(tokens_of(deltas)) == 5
    with pytest.raises(ContextOverflow, match=str(CONTEXT)):
        await generate(engine, request_for(prompt_of(CONTEXT - 5), max_tokens=6))


@pytest.mark.parametrize("count", [0, 3])
async def test_logprobs(engine: Engine, count: int) -> None:
    deltas = await generate(engine, request_for(prompt_of(20), logprobs=count))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry[0].token_id for entry in entries] == tokens_of(deltas)
    for sampled, *alternatives in entries:
        assert [alternative.rank for alternative in alternatives] == list(range(1, count + 1))
        assert sampled.rank == 1 and sampled.logprob <= 0
        assert sorted(alternatives, key=lambda entry: -entry.logprob) == alternatives
        assert count == 0 or alternatives[0] == sampled


async def test_prompt_logprobs(engine: Engine) -> None:
    prompt = prompt_of(40)
    if not engine.info.prompt_logprobs:
        with pytest.raises(InvalidRequest) as caught:
            await generate(engine, request_for(prompt, prompt_logprobs=2))
        assert caught.value.param == "prompt_logprobs"
        return
    reports = [(await generate(engine, request_for(prompt, prompt_logprobs=2)))[0].prompt for _ in range(2)]
    for report in reports:  # the second time, the prompt's blocks could be reused
        assert report is not None and report.logprobs is not None
        first, *rest = report.logprobs
        assert first is None
        assert [entry[0].token_id for entry in rest if entry is not None] == list(prompt[1:])
        assert all(entry is not None and [alternative.rank for alternative in entry[1:]] == [1, 2] for entry in rest)


async def test_many_requests_at_once_do_not_mix(engine: Engine) -> None:
    prompts = [prompt_of(length) for length in range(5, 45)]
    alone = [tokens_of(await generate(engine, request_for(prompt, max_tokens=12))) for prompt in prompts[::10]]
    together = await asyncio.gather(*(generate(engine, request_for(prompt, max_tokens=12)) for prompt in prompts))
    assert all(deltas[-1].finish_reason == "length" and len(tokens_of(deltas)) == 12 for deltas in together)
    assert [tokens_of(deltas) for deltas in together[::10]] == alone


async def test_a_slow_consumer_gets_merged_deltas(engine: Engine) -> None:
    stream = engine.generate(request_for(prompt_of(20), max_tokens=100, logprobs=1))
    over = asyncio.Event()
    stream.when_done(over.set)
    deltas = [await anext(stream)]
    await over.wait()
    deltas += [delta async for delta in stream]
    assert len(deltas) <= 4  # the first, two parts of at most 64 merged ones, and one that came late
    assert len(tokens_of(deltas)) == 100
    assert [entry[0].token_id for delta in deltas for entry in delta.logprobs] == tokens_of(deltas)


async def test_stats_follow_the_work(engine: Engine) -> None:
    before = await idle(engine)
    seen = asyncio.Event()

    async def work() -> None:
        while not seen.is_set():  # a fast engine is done before the next statistics
            await generate(engine, request_for(prompt_of(40), max_tokens=100))

    task = asyncio.create_task(work())
    async for stats in engine.stats():
        if stats.num_active_requests:
            seen.set()
            break
    assert stats.kv_cache_stats.used_num_blocks >= 3
    assert stats.kv_cache_stats.max_num_blocks == engine.info.num_blocks
    assert (
        stats.kv_cache_stats.free_num_blocks
        == stats.kv_cache_stats.max_num_blocks - stats.kv_cache_stats.used_num_blocks
    )
    await task
    after = await idle(engine, before)
    assert after.num_completed_requests > before.num_completed_requests
    assert after.iteration >= stats.iteration >= before.iteration  # they may be those of the last step
    assert after.iteration > before.iteration


async def test_any_number_of_consumers_of_stats(engine: Engine) -> None:
    assert len(await asyncio.gather(*(idle(engine) for _ in range(3)))) == 3


async def test_repetition_reuses_whole_blocks_of_the_same_salt(engine: Engine) -> None:
    prompt = prompt_of(2 * BLOCK + 8)

    async def cached(prompt: tuple[int, ...], salt: str = "") -> int:
        report = (await generate(engine, request_for(prompt, salt)))[0].prompt
        assert report is not None
        return report.cached_tokens

    assert await cached(prompt) == 0
    assert await cached(prompt) == 2 * BLOCK
    assert await cached(prompt[: 2 * BLOCK]) == BLOCK, "the last token is always computed"
    assert await cached(prompt, "salt") == 0
    assert await cached(prompt, "salt") == 2 * BLOCK
    assert await cached(prompt[:BLOCK] + prompt_of(BLOCK)) == BLOCK
    assert await cached(prompt_of(1) + prompt[1:]) == 0


async def test_kv_events_are_gapless_and_chained(subject: Subject) -> None:
    prompt = prompt_of(3 * BLOCK + 1)
    await generate(subject.engine, request_for(prompt, max_tokens=BLOCK))
    for _ in range(100):
        if chain := stored_chain(subject.events, prompt):
            break
        await asyncio.sleep(0.05)
    assert len(chain) == 3
    assert [event.event_id for event in subject.events] == list(range(len(subject.events)))
    assert isinstance(subject.events[0].data, Created)
    assert subject.events[0].data.num_blocks_per_cache_level[0] == subject.engine.info.num_blocks
    known: set[int] = set()
    for event in subject.events[1:]:
        if isinstance(event.data, Stored):
            assert event.data.parent_hash is None or event.data.parent_hash in known
            known |= {block.block_hash for block in event.data.blocks}
            assert all(len(block.tokens) == BLOCK for block in event.data.blocks)
        elif isinstance(event.data, Removed):
            known -= set(event.data.block_hashes)


async def test_before_start_and_after_close(fresh: AbstractAsyncContextManager[Engine]) -> None:
    async with fresh as engine:
        assert not engine.healthy
        with pytest.raises(EngineNotReady):
            _ = engine.info
        with pytest.raises(EngineNotReady):
            await generate(engine, request_for(prompt_of(5)))
        await engine.start()
        assert engine.healthy and engine.info.vocab_size == VOCABULARY and EOS in engine.info.eos_token_ids
        streams = [engine.generate(request_for(prompt_of(20), max_tokens=400)) for _ in range(20)]
        await anext(streams[0])
        watching = asyncio.create_task(exhaust(engine.stats()))
        await engine.close()
        for stream in streams:
            with pytest.raises(EngineUnavailable):
                _ = [delta async for delta in stream]
        await asyncio.wait_for(watching, 20)
        assert not engine.healthy
        with pytest.raises(EngineNotReady):
            await generate(engine, request_for(prompt_of(5)))
        await engine.close()


async def test_close_without_start(tiny_model: Path) -> None:
    for kind in ONCE:
        async with engine_of(kind, config_of(kind, tiny_model)) as engine:
            await engine.close()


async def test_the_end_of_reasoning_is_forced_when_its_budget_is_spent(engine: Engine) -> None:
    """In a batch with others, greedy or drawn, and only inside reasoning."""
    close, begin = [5, 6, 9], 11
    prompts = [prompt_of(20) for _ in range(3)]
    free = [tokens_of(await generate(engine, request_for(prompt, max_tokens=12))) for prompt in prompts]
    budget = ReasoningBudget(tokens=4, close=tuple(close), inside=True, steps={0: {begin: 1}, 1: {6: 0}})
    drawn = {"temperature": 1.0, "logit_bias": {6: -100.0, begin: -100.0}}
    requests = [request_for(prompt, max_tokens=12, reasoning_budget=budget) for prompt in prompts]
    requests += [request_for(prompts[0], max_tokens=12, reasoning_budget=budget, **drawn)]
    requests += [request_for(prompts[0], max_tokens=12, reasoning_budget=replace(budget, inside=False), **drawn)]
    *greedy, sampled, outside = [
        tokens_of(deltas) for deltas in await asyncio.gather(*(generate(engine, request) for request in requests))
    ]
    for expected, found in zip(free, greedy, strict=True):
        assert len(found) == 12
        if 6 not in expected[:4]:
            assert (found[:4], found[4:7]) == (expected[:4], close)
    if engine.info.backend != "fake":
        assert sampled[4:7] == close and 6 not in outside
