"""Metrics of the engine under TensorRT-LLM's names: its facts, and its newest statistics."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.stats import InflightBatchingStats, IterationStats
from engine.types import EngineInfo


class _Collector:
    """Metrics of one engine, labelled with its model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"trtllm_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"trtllm_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class InfoCollector(_Collector):
    """Facts that the engine reported when it had started."""

    def __init__(self, info: EngineInfo, model_name: str) -> None:
        super().__init__(model_name)
        self._info = info

    def collect(self) -> Iterable[Metric]:
        info = self._info
        yield self._gauge("model_load_time_seconds", "Seconds that loading the model took", info.load_seconds)
        yield self._gauge(
            "model_context_length",
            "Maximum number of tokens of a sequence, prompt and output together",
            info.context_length,
        )
        yield self._gauge("model_max_num_seqs", "Maximum number of sequences in one step", info.max_num_seqs)
        yield self._gauge("model_max_num_batched_tokens", "Maximum number of tokens in one step", info.max_num_tokens)
        yield self._gauge("kv_cache_block_size", "Tokens in a KV block", info.block_size)
        yield self._gauge("data_parallel_size", "Ranks with a KV cache of their own", info.data_parallel_size)
        yield self._gauge("tensor_parallel_size", "Ranks that share each layer", info.tensor_parallel_size)


class EngineCollector(_Collector):
    """The engine's newest statistics."""

    def __init__(self, stats: IterationStats, model_name: str, queued: float, speed: float) -> None:
        """`queued`: sequences that wait before the engine. `speed`: of the latest KV transfers, in bytes per second."""
        super().__init__(model_name)
        self._stats = stats
        self._queued = queued
        self._speed = speed

    def collect(self) -> Iterable[Metric]:
        stats, blocks = self._stats, self._stats.kv_cache_stats
        yield self._gauge("num_requests_running", "Sequences that run", stats.num_active_requests)
        yield self._gauge(
            "num_requests_waiting",
            "Sequences that wait, in and before the engine",
            stats.num_queued_requests + self._queued,
        )
        yield self._gauge(
            "kv_cache_utilization",
            "Fraction of the KV blocks in use",
            blocks.used_num_blocks / max(blocks.max_num_blocks, 1),
        )
        yield self._gauge(
            "kv_cache_hit_rate", "Fraction of the prompts' blocks that were reused", blocks.cache_hit_rate
        )
        yield self._gauge("kv_cache_max_blocks", "KV blocks", blocks.max_num_blocks)
        yield self._gauge("kv_cache_used_blocks", "KV blocks that sequences reference", blocks.used_num_blocks)
        yield self._gauge("kv_cache_free_blocks", "KV blocks that can be allocated", blocks.free_num_blocks)
        yield self._counter("kv_cache_reused_blocks", "Blocks of prompts found in the cache", blocks.reused_blocks)
        yield self._counter("kv_cache_missed_blocks", "Blocks of prompts not found in the cache", blocks.missed_blocks)
        yield self._counter(
            "num_requests_completed", "Sequences that finished in the engine", stats.num_completed_requests
        )
        yield self._counter(
            "engine_aborted_requests", "Sequences that were aborted in the engine", stats.num_aborted_requests
        )
        yield self._counter(
            "num_preemptions",
            "Sequences that gave up their KV blocks and were computed again",
            stats.num_preemptions,
        )
        yield self._counter("iterations", "Steps of the engine", stats.iteration)
        yield self._gauge("iteration_latency_seconds", "The engine's latest step", stats.iter_latency_ms / 1e3)
        yield from self._collect_batch(stats.inflight_batching_stats)
        yield from self._collect_transfers(stats)

    def _collect_batch(self, batch: InflightBatchingStats) -> Iterable[Metric]:
        """Yield metrics of the latest step."""
        yield self._gauge("num_requests_scheduled", "Sequences in the latest step", batch.num_scheduled_requests)
        yield self._gauge(
            "num_context_requests", "Sequences of the latest step whose prompts it computed", batch.num_context_requests
        )
        yield self._gauge(
            "num_generation_requests",
            "Sequences of the latest step that it generated a token for",
            batch.num_gen_requests,
        )
        yield self._gauge("num_context_tokens", "Prompt tokens in the latest step", batch.num_ctx_tokens)

    def _collect_transfers(self, stats: IterationStats) -> Iterable[Metric]:
        """Yield metrics of KV blocks that move between replicas."""
        yield self._gauge(
            "num_requests_held", "Prompts whose KV blocks are kept for another replica", stats.num_held_requests
        )
        yield self._gauge("kv_cache_held_blocks", "KV blocks that are kept for other replicas", stats.num_held_blocks)
        yield self._gauge(
            "num_requests_fetching", "Sequences whose KV blocks are being read", stats.num_fetching_requests
        )
        yield self._counter("kv_transfer_success", "Prompts whose KV blocks were read", stats.kv_transfer_success_total)
        yield self._counter(
            "kv_transfer_failure",
            "Prompts computed again because reading their KV blocks failed",
            stats.kv_transfer_failure_total,
        )
        yield self._counter("kv_transfer_bytes", "Bytes of KV blocks read", stats.kv_transfer_bytes)
        yield self._counter(
            "kv_transfer_latency_seconds", "Seconds that reading KV blocks took", stats.kv_transfer_latency_seconds
        )
        yield self._gauge(
            "kv_transfer_speed_gb_s",
            "Speed of the latest reads of KV blocks in GB (1e9 bytes) per second",
            self._speed / 1e9,
        )
