"""Iteration statistics, under the names and in the units of TensorRT-LLM 1.2 (`LLM.get_stats`), as far as both engines
know them.
"""

from msgspec import Struct, field


class KvCacheStats(Struct, frozen=True, kw_only=True, rename="camel"):
    """Counts of KV blocks. `alloc_*`, `reused_blocks` and `missed_blocks` count from the start of the engine;
    `cache_hit_rate` is reused / (reused + missed). `used_num_blocks` counts the blocks held by live sequences."""

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


class InflightBatchingStats(Struct, frozen=True, kw_only=True, rename="camel"):
    """Figures of the last step. `num_paused_requests` counts the sequences it preempted."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


class SpecDecodingStats(Struct, frozen=True, kw_only=True, rename="camel"):
    """Figures of speculation since the engine's start."""

    num_drafts: int = 0
    """Drafts that were computed: several tokens of a sequence in one step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Accepted tokens by their place in the draft."""


class RankStats(Struct, frozen=True, kw_only=True):
    """One of several data-parallel ranks, after one step."""

    rank: int
    num_active_requests: int
    num_queued_requests: int
    kv_cache_stats: KvCacheStats


class TierStats(Struct, frozen=True):
    """A KV tier below the device. Counters count from the engine's start."""

    tier: str
    """`host` or `disk`."""
    capacity_bytes: int
    """0 if the tier failed and was given up."""
    used_bytes: int
    num_blocks: int
    stored_bytes: int = 0
    loaded_bytes: int = 0
    hit_blocks: int = 0
    """Blocks that were loaded instead of computed."""
    load_seconds: float = 0.0
    """Sum over them; threads that load at the same time count each."""
    avoided_blocks: int = 0
    """Blocks that were computed because that was faster than loading them."""
    evicted_blocks: int = 0
    failures: int = 0
    """Blocks that could not be written or read, or that were damaged."""


class IterationStats(Struct, frozen=True, kw_only=True, rename="camel"):
    """The engine after one step. Counters count from its start; `timestamp` is in seconds since the epoch.

    `ranks`, `num_aborted_requests`, `num_preemptions` and all of disaggregation are our additions to TensorRT-LLM's
    keys.
    """

    timestamp: float
    iteration: int = field(name="iter")
    iter_latency_ms: float = field(name="iterLatencyMS")
    num_active_requests: int
    num_queued_requests: int
    num_completed_requests: int
    max_num_active_requests: int
    kv_cache_stats: KvCacheStats
    inflight_batching_stats: InflightBatchingStats
    attention_dp_rank: int | None = None
    """Rank of these figures; None if they cover all ranks."""
    ranks: tuple[RankStats, ...] = ()
    """Figures of each of several ranks; those above are their sums."""
    num_aborted_requests: int = 0
    num_preemptions: int = 0
    num_held_requests: int = 0
    """Prompts whose KV blocks are kept for another replica to read."""
    num_held_blocks: int = 0
    """Blocks of these prompts, also counted as used; a block that two prompts share counts twice."""
    spec_decoding_stats: SpecDecodingStats | None = None
    """Counts of speculation, None without. The embedded engine's are totals since its start."""
    num_fetching_requests: int = 0
    """Sequences whose KV blocks are being read from another replica; they are active requests too."""
    kv_transfer_success_total: int = 0
    kv_transfer_failure_total: int = 0
    """Transfers that failed or took too long; the prompt was then computed here."""
    kv_transfer_bytes: int = 0
    """Bytes read by the transfers that succeeded."""
    kv_transfer_latency_seconds: float = 0.0
    """Sum over the transfers that succeeded, each from its first read to its last byte."""
    tiers: tuple[TierStats, ...] = ()
    """KV tiers below the device, if there are any."""
