"""A18: attention DP. Requests go to the rank that a router named, or that has their prompt; statistics are per rank."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ContextOverflow
from engine.trtllm.engine import TrtllmEngine
from engine.trtllm.polling import iteration_stats
from engine.trtllm.ranks import summed
from engine.types import GenerateRequest
from server.metrics.engine import stats_metrics
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import BOTH_VERSIONS, found
from tests.support.trtllm_gotchas import request, running, tokens
from tests.support.waiting import until

trt, folder, calls = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder, trtllm_gotchas_support.calls  # fixtures
RANKS = 3
EVENTS = {"kv_cache_config": {"event_buffer_max_size": 1000, "tokens_per_block": 4}}
ADP: dict[str, Any] = {"enable_attention_dp": True, "tensor_parallel_size": RANKS}
LONG = tuple(range(10, 34))


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_GPUS", str(RANKS))


def ranks_of(calls: list[Any]) -> list[int | None]:
    params = [keywords["scheduling_params"] for _, keywords in calls]
    assert all(one is None or one.attention_dp_relax is False for one in params)
    return [None if one is None else one.attention_dp_rank for one in params]


async def cached(engine: TrtllmEngine, wanted: GenerateRequest) -> int:
    first, *_ = [delta async for delta in engine.generate(wanted)]
    assert first.prompt is not None
    return first.prompt.cached_tokens


@BOTH_VERSIONS
async def test_a_router_names_the_rank(folder: Path, calls: list[Any]) -> None:
    """The prompt's blocks are in that rank's cache only. A rank that does not exist would end the executor."""
    async with running(folder, **ADP, kv_cache_config={"tokens_per_block": 4}) as engine:
        assert engine.info.data_parallel_size == RANKS
        assert await cached(engine, request(prompt_token_ids=LONG, dp_rank=2)) == 0
        assert await cached(engine, request(prompt_token_ids=LONG, dp_rank=2)) > 0
        assert await cached(engine, request(prompt_token_ids=LONG, dp_rank=0)) == 0
        for wrong in (RANKS, -1, 1 << 40, None):
            assert await tokens(engine, request(dp_rank=wrong)), wrong
        assert engine.healthy
    assert ranks_of(calls)[1:] == [2, 2, 0, None, None, None, None]


@BOTH_VERSIONS
async def test_without_a_router_the_rank_that_has_the_prompt_computes_it(folder: Path, calls: list[Any]) -> None:
    async with running(folder, **ADP, **EVENTS) as engine:
        await tokens(engine, request(prompt_token_ids=LONG))
        (chosen,) = ranks_of(calls)[1:]
        await until(lambda: engine.ranks.index.blocks(chosen) >= 5)
        assert await cached(engine, request(prompt_token_ids=LONG)) > 0
        streams = [engine.generate(request(prompt_token_ids=(40 + i, *LONG), max_tokens=500)) for i in range(RANKS)]
        for stream in streams:
            await anext(stream)
        assert sorted(rank for rank in ranks_of(calls)[3:] if rank is not None) == list(range(RANKS)), "they share work"
        for stream in streams:
            await stream.aclose()
    assert ranks_of(calls)[2] == chosen


async def test_other_engines_get_no_rank(folder: Path, calls: list[Any]) -> None:
    async with running(folder, **EVENTS) as engine:
        await tokens(engine, request(dp_rank=1))
    assert set(ranks_of(calls)) == {None}


async def test_statistics_of_ranks_are_told_apart_and_added_up(folder: Path) -> None:
    """Newer versions have a row for each rank."""
    found("tensorrt_llm._test").stats_of_all_ranks = True
    async with running(folder, **ADP) as engine:
        streams = [engine.generate(request(dp_rank=rank, max_tokens=900)) for rank in (0, 1, 1)]
        for stream in streams:
            await anext(stream)
        async for newest in engine.stats():
            if [rank.num_active_requests for rank in newest.ranks][:2] == [1, 2]:
                break
        assert [rank.rank for rank in newest.ranks][:2] == [0, 1] and newest.num_active_requests == 3
        used = [rank.kv_cache_stats.used_num_blocks for rank in newest.ranks]
        assert sum(used) == newest.kv_cache_stats.used_num_blocks > used[1] > 0
        for stream in streams:
            await stream.aclose()
        async for newest in engine.stats():
            if newest.num_active_requests == 0:
                break
        assert {rank.num_active_requests for rank in newest.ranks} == {0}


async def test_1_2_1_has_statistics_of_the_first_rank_only(folder: Path) -> None:
    async with running(folder, **ADP) as engine:
        await tokens(engine, request(dp_rank=1))
        assert [rank.rank for rank in (await anext(engine.stats())).ranks] == [0]


def test_the_sum_of_rows() -> None:
    cache = {"maxNumBlocks": 10, "freeNumBlocks": 6, "usedNumBlocks": 4, "tokensPerBlock": 32, "reusedBlocks": 3}
    row = {"iter": 7, "numActiveRequests": 2, "kvCacheStats": {**cache, "missedBlocks": 1}}
    both = summed([iteration_stats({**row, "attentionDpRank": rank, "iter": 7 + rank}) for rank in (1, 0)])
    assert (both.iteration, both.num_active_requests, both.kv_cache_stats.max_num_blocks) == (8, 4, 20)
    assert both.kv_cache_stats.cache_hit_rate == 0.75 and [rank.rank for rank in both.ranks] == [0, 1]


async def test_a_sequence_is_no_longer_than_the_blocks_of_a_rank(folder: Path) -> None:
    """1.2.1's worker shortens its `max_seq_len` to what its KV cache can hold, and tells nobody."""
    async with running(folder, kv_cache_config={"max_tokens": 128, "tokens_per_block": 4}) as engine:
        assert engine.info.context_length == 128
        with pytest.raises(ContextOverflow):
            await tokens(engine, request(prompt_token_ids=(5,) * 128, max_tokens=1))


async def test_metrics_tell_ranks_apart(folder: Path) -> None:
    found("tensorrt_llm._test").stats_of_all_ranks = True
    async with running(folder, **ADP) as engine:
        for rank in range(RANKS):
            await tokens(engine, request(dp_rank=rank))
        async for stats in engine.stats():
            if len(stats.ranks) == RANKS:
                break
    families = {family.name: family for family in stats_metrics(stats, 0, 0, "m")}
    shown = families["trtllm_rank_kv_cache_max_blocks"].samples
    assert [sample.labels for sample in shown] == [{"model_name": "m", "dp_rank": str(rank)} for rank in range(RANKS)]
    assert sum(sample.value for sample in shown) == families["trtllm_kv_cache_max_blocks"].samples[0].value
