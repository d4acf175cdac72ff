"""Prometheus metrics of the engine's configuration and latest statistics, with TensorRT-LLM's names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.stats import IterationStats, RankStats, TierStats
from engine.types import EngineInfo

T = TypeVar("T")
Family = GaugeMetricFamily | CounterMetricFamily
Rows = list[tuple[str, str, float]]
"""Name, description and value of metrics of one type."""
PartRows = list[tuple[type[Family], str, str, Callable[[T], float]]]
"""Type, name, description and value of metrics that each part of the engine has."""


def info_metrics(info: EngineInfo, model_name: str) -> Iterator[Metric]:
    """Yield metrics of the configuration that the engine reported when it started."""
    gauges: Rows = [
        ("model_load_time_seconds", "Seconds that loading the model took", info.load_seconds),
        (
            "model_context_length",
            "Maximum number of tokens of a sequence, prompt and output together",
            info.context_length,
        ),
        ("model_max_num_seqs", "Maximum number of sequences in one step", info.max_num_seqs),
        ("model_max_num_batched_tokens", "Maximum number of tokens in one step", info.max_num_tokens),
        ("shared_weight_bytes", "Weights in memory of the memory service", info.shared_weight_bytes),
        ("kv_cache_block_size", "Tokens in a KV block", info.block_size),
        ("kv_cache_tokens_per_block", "Tokens in a KV block, as TensorRT-LLM calls them", info.block_size),
        ("data_parallel_size", "Ranks with a KV cache of their own", info.data_parallel_size),
        ("tensor_parallel_size", "Ranks that share each layer", info.tensor_parallel_size),
    ]
    yield from _families(GaugeMetricFamily, gauges, model_name)


def stats_metrics(stats: IterationStats, queued: float, speed: float, model_name: str) -> Iterator[Metric]:
    """Yield metrics of the engine's latest statistics. `queued` is the number of sequences that wait to be admitted to
    the engine, `speed` that of the latest KV transfers in bytes per second.
    """
    blocks = stats.kv_cache_stats
    batch = stats.inflight_batching_stats
    drafts = stats.spec_decoding_stats
    waiting = stats.num_queued_requests + queued
    utilization = blocks.used_num_blocks / max(blocks.max_num_blocks, 1)
    gauges: Rows = [
        ("num_requests_running", "Sequences that run", stats.num_active_requests),
        ("num_requests_waiting", "Sequences that wait, in and before the engine", waiting),
        ("kv_cache_utilization", "Fraction of the KV blocks in use", utilization),
        ("kv_cache_hit_rate", "Fraction of the prompts' blocks that were reused", blocks.cache_hit_rate),
        ("kv_cache_max_blocks", "KV blocks of the cache", blocks.max_num_blocks),
        ("kv_cache_used_blocks", "KV blocks that sequences reference", blocks.used_num_blocks),
        ("kv_cache_free_blocks", "KV blocks that can be allocated", blocks.free_num_blocks),
        ("iteration_latency_seconds", "The engine's latest step", stats.iter_latency_ms / 1e3),
        # The latest step
        ("num_requests_scheduled", "Sequences in the latest step", batch.num_scheduled_requests),
        ("num_context_requests", "Sequences of the latest step whose prompts it computed", batch.num_context_requests),
        ("num_generation_requests", "Sequences that the latest step generated a token for", batch.num_gen_requests),
        ("num_context_tokens", "Prompt tokens in the latest step", batch.num_ctx_tokens),
        # KV blocks that move between replicas
        ("num_requests_held", "Prompts whose KV blocks are kept for another replica", stats.num_held_requests),
        ("kv_cache_held_blocks", "KV blocks that are kept for other replicas", stats.num_held_blocks),
        ("num_requests_fetching", "Sequences whose KV blocks are being read", stats.num_fetching_requests),
        ("kv_transfer_speed_bytes_per_second", "Speed of the latest reads of KV blocks", speed),
    ]
    counters: Rows = [
        ("kv_cache_reused_blocks", "Blocks of prompts found in the cache", blocks.reused_blocks),
        ("kv_cache_missed_blocks", "Blocks of prompts not found in the cache", blocks.missed_blocks),
        ("num_requests_completed", "Sequences that finished in the engine", stats.num_completed_requests),
        ("engine_aborted_requests", "Sequences that were aborted in the engine", stats.num_aborted_requests),
        ("num_preemptions", "Sequences that gave up their KV blocks and were computed again", stats.num_preemptions),
        ("iterations", "Steps of the engine", stats.iteration),
        ("kv_transfer_success", "Prompts whose KV blocks were read", stats.kv_transfer_success_total),
        (
            "kv_transfer_failure",
            "Prompts computed again because reading their KV blocks failed",
            stats.kv_transfer_failure_total,
        ),
        ("kv_transfer_bytes", "Bytes of KV blocks read", stats.kv_transfer_bytes),
        ("kv_transfer_seconds", "Seconds that reading KV blocks took", stats.kv_transfer_latency_seconds),
    ]
    if drafts is not None:
        counters.append(("spec_decode_num_drafts", "Drafts that were checked", drafts.num_drafts))
        yield _by_position(drafts.accepted_per_position, model_name)
    yield from _families(GaugeMetricFamily, gauges, model_name)
    yield from _families(CounterMetricFamily, counters, model_name)
    yield from _rank_metrics(stats.ranks, model_name)
    yield from _tier_metrics(stats.tiers, model_name)


def _by_position(accepted: Sequence[int], model_name: str) -> Metric:
    """Return the numbers of accepted draft tokens by their position in the draft."""
    text = "Drafted tokens that the model accepted, by their place in the draft"
    name = "trtllm_spec_decode_num_accepted_tokens_per_pos"
    family = CounterMetricFamily(name, text, labels=["model_name", "position"])
    for position, count in enumerate(accepted):
        family.add_metric([model_name, str(position)], count)
    return family


def _rank_metrics(ranks: Sequence[RankStats], model_name: str) -> Iterator[Metric]:
    """Yield metrics of data-parallel ranks, without samples if there is one rank."""
    gauge = GaugeMetricFamily
    rows: PartRows[RankStats] = [
        (gauge, "num_requests_running", "Sequences that run on the rank", lambda rank: rank.num_active_requests),
        (gauge, "num_requests_waiting", "Sequences that wait for the rank", lambda rank: rank.num_queued_requests),
        (gauge, "kv_cache_max_blocks", "KV blocks of the rank", lambda rank: rank.kv_cache_stats.max_num_blocks),
        (
            gauge,
            "kv_cache_used_blocks",
            "KV blocks in use on the rank",
            lambda rank: rank.kv_cache_stats.used_num_blocks,
        ),
        (
            gauge,
            "kv_cache_hit_rate",
            "Reused fraction of the blocks of prompts",
            lambda rank: rank.kv_cache_stats.cache_hit_rate,
        ),
    ]
    yield from _parts("rank", rows, "dp_rank", {str(rank.rank): rank for rank in ranks}, model_name)


def _tier_metrics(tiers: Sequence[TierStats], model_name: str) -> Iterator[Metric]:
    """Yield metrics of KV tiers below the device, without samples if there are no tiers."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    rows: PartRows[TierStats] = [
        (gauge, "max_bytes", "Bytes that the tier may use; 0 if it failed", lambda tier: tier.capacity_bytes),
        (gauge, "used_bytes", "Bytes that the tier uses", lambda tier: tier.used_bytes),
        (gauge, "blocks", "KV blocks in the tier", lambda tier: tier.num_blocks),
        (counter, "stored_bytes", "Bytes copied to the tier", lambda tier: tier.stored_bytes),
        (counter, "loaded_bytes", "Bytes loaded from the tier", lambda tier: tier.loaded_bytes),
        (counter, "hit_blocks", "KV blocks loaded instead of computed", lambda tier: tier.hit_blocks),
        (counter, "load_seconds", "Seconds that loading blocks took", lambda tier: tier.load_seconds),
        (
            counter,
            "avoided_blocks",
            "KV blocks computed because that is faster than loading them",
            lambda tier: tier.avoided_blocks,
        ),
        (counter, "evicted_blocks", "KV blocks that made way for others", lambda tier: tier.evicted_blocks),
        (counter, "failures", "KV blocks lost to errors or damage", lambda tier: tier.failures),
    ]
    yield from _parts("kv_tier", rows, "tier", {tier.tier: tier for tier in tiers}, model_name)


def _parts(prefix: str, rows: PartRows[T], label: str, parts: Mapping[str, T], model_name: str) -> Iterator[Metric]:
    """Yield one metric for each row, with a sample for each of the `parts`, by the value of `label`."""
    for kind, name, text, value in rows:
        family = kind(f"trtllm_{prefix}_{name}", text, labels=["model_name", label])
        for part_name, part in parts.items():
            family.add_metric([model_name, part_name], value(part))
        yield family


def _families(kind: type[Family], rows: Rows, model_name: str) -> Iterator[Metric]:
    for name, text, value in rows:
        family = kind(f"trtllm_{name}", text, labels=["model_name"])
        family.add_metric([model_name], value)
        yield family
