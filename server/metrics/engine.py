"""Metrics of the engine under TensorRT-LLM's names: its facts, and its newest statistics."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.stats import IterationStats, RankStats, TierStats
from engine.types import EngineInfo

Rows = list[tuple[str, str, float]]
"""Name, description and value of metrics of one kind."""


def info_metrics(info: EngineInfo, model_name: str) -> Iterator[Metric]:
    """Yield facts that the engine reported when it had started."""
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
        ("data_parallel_size", "Ranks with a KV cache of their own", info.data_parallel_size),
        ("tensor_parallel_size", "Ranks that share each layer", info.tensor_parallel_size),
    ]
    yield from _families(GaugeMetricFamily, gauges, model_name)


def stats_metrics(stats: IterationStats, queued: float, speed: float, model_name: str) -> Iterator[Metric]:
    """Yield the engine's newest statistics. `queued`: sequences that wait before the engine. `speed`: of the latest KV
    transfers, in bytes per second.
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
        ("kv_cache_max_blocks", "KV blocks", blocks.max_num_blocks),
        ("kv_cache_used_blocks", "KV blocks that sequences reference", blocks.used_num_blocks),
        ("kv_cache_free_blocks", "KV blocks that can be allocated", blocks.free_num_blocks),
        ("iteration_latency_seconds", "The engine's latest step", stats.iter_latency_ms / 1e3),
        # The latest step
        ("num_requests_scheduled", "Sequences in the latest step", batch.num_scheduled_requests),
        ("num_context_requests", "Sequences of the latest step whose prompts it computed", batch.num_context_requests),
        (
            "num_generation_requests",
            "Sequences of the latest step that it generated a token for",
            batch.num_gen_requests,
        ),
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
    """Return the drafted tokens that were accepted, by their place in the draft."""
    text = "Drafted tokens that the model accepted, by their place in the draft"
    name = "trtllm_spec_decode_num_accepted_tokens_per_pos"
    family = CounterMetricFamily(name, text, labels=["model_name", "position"])
    for position, count in enumerate(accepted):
        family.add_metric([model_name, str(position)], count)
    return family


def _rank_metrics(ranks: Sequence[RankStats], model_name: str) -> Iterator[Metric]:
    """Yield figures of data-parallel ranks; without samples where there is one rank."""
    rows: list[tuple[str, str, Callable[[RankStats], float]]] = [
        ("num_requests_running", "Sequences that run on the rank", lambda rank: rank.num_active_requests),
        ("num_requests_waiting", "Sequences that wait for the rank", lambda rank: rank.num_queued_requests),
        ("kv_cache_max_blocks", "KV blocks of the rank", lambda rank: rank.kv_cache_stats.max_num_blocks),
        ("kv_cache_used_blocks", "KV blocks in use on the rank", lambda rank: rank.kv_cache_stats.used_num_blocks),
        (
            "kv_cache_hit_rate",
            "Reused fraction of the blocks of prompts",
            lambda rank: rank.kv_cache_stats.cache_hit_rate,
        ),
    ]
    for name, text, value in rows:
        family = GaugeMetricFamily(f"trtllm_rank_{name}", text, labels=["model_name", "dp_rank"])
        for rank in ranks:
            family.add_metric([model_name, str(rank.rank)], value(rank))
        yield family


def _tier_metrics(tiers: Sequence[TierStats], model_name: str) -> Iterator[Metric]:
    """Yield figures of KV tiers below the device; without samples where there are none."""
    rows: list[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[TierStats], float]]] = [
        (
            GaugeMetricFamily,
            "max_bytes",
            "Bytes that the tier may use; 0 if it failed",
            lambda tier: tier.capacity_bytes,
        ),
        (GaugeMetricFamily, "used_bytes", "Bytes that the tier uses", lambda tier: tier.used_bytes),
        (GaugeMetricFamily, "blocks", "KV blocks in the tier", lambda tier: tier.num_blocks),
        (CounterMetricFamily, "stored_bytes", "Bytes copied to the tier", lambda tier: tier.stored_bytes),
        (CounterMetricFamily, "loaded_bytes", "Bytes loaded from the tier", lambda tier: tier.loaded_bytes),
        (CounterMetricFamily, "hit_blocks", "KV blocks loaded instead of computed", lambda tier: tier.hit_blocks),
        (CounterMetricFamily, "load_seconds", "Seconds that loading blocks took", lambda tier: tier.load_seconds),
        (
            CounterMetricFamily,
            "avoided_blocks",
            "KV blocks computed since that is faster than loading them",
            lambda tier: tier.avoided_blocks,
        ),
        (CounterMetricFamily, "evicted_blocks", "KV blocks that made way for others", lambda tier: tier.evicted_blocks),
        (CounterMetricFamily, "failures", "KV blocks lost to errors or damage", lambda tier: tier.failures),
    ]
    for kind, name, text, value in rows:
        family = kind(f"trtllm_kv_tier_{name}", text, labels=["model_name", "tier"])
        for tier in tiers:
            family.add_metric([model_name, tier.tier], value(tier))
        yield family


def _families(kind: type[GaugeMetricFamily | CounterMetricFamily], rows: Rows, model_name: str) -> Iterator[Metric]:
    for name, text, value in rows:
        family = kind(f"trtllm_{name}", text, labels=["model_name"])
        family.add_metric([model_name], value)
        yield family
