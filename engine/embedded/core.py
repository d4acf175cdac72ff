"""The engine's turn: schedule, run, postprocess. Synchronous and owned by one thread; `engine/embedded/engine.py` drives it."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequence_

import torch

from engine.config import EmbeddedConfig
from engine.embedded.attention import sort_chunks
from engine.embedded.blocks import BlockPool, EventData
from engine.embedded.model import Model
from engine.embedded.sampler import Sampled, Sampler, prompt_logprobs
from engine.embedded.scheduler import Chunk, Scheduler
from engine.embedded.sequence import Sequence
from engine.errors import EngineFailure
from engine.kv_events import KvEvent
from engine.stats import InflightBatchingStats, IterationStats, KvCacheStats
from engine.types import Delta, FinishReason, PromptReport

Outputs = list[tuple[str, Delta | EngineFailure]]
"""What a step has for each request id that it touched."""


class EngineCore:
    """Model, block pool, scheduler and sampler, and the sequences that are alive."""

    def __init__(self, config: EmbeddedConfig, publish: Callable[[KvEvent], None]) -> None:
        self.model = Model(config)
        self._publish_event = publish
        self._event_id = 0
        self.pool = BlockPool(len(self.model.cache.data), config.kv_block_size, reuse=config.enable_block_reuse, publish=self._publish)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            chunked_prefill=config.enable_chunked_prefill,
        )
        self._sampler = Sampler(self.model.vocab_size, self.model.device)
        self._sequences: dict[str, Sequence] = {}
        self._max_num_seqs = config.max_batch_size
        self._iteration = self._completed = self._aborted = 0
        self._last = InflightBatchingStats()
        self._latency_ms = 0.0

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its request id must be new."""
        assert sequence.request.request_id not in self._sequences, "request ids are unique"
        self._sequences[sequence.request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Drop a sequence and free its blocks; nothing happens if it has finished."""
        if sequence := self._sequences.pop(request_id, None):
            self.scheduler.remove(sequence)
            self._aborted += 1
            self._audit_when_idle()

    def step(self) -> Outputs:
        """Run one step. A failure in it ends the sequences that took part, and no others."""
        started, preemptions = time.monotonic(), self.scheduler.preemptions
        chunks = sort_chunks(self.scheduler.schedule())
        for chunk in chunks:
            if chunk.sequence.first_scheduled is None:
                chunk.sequence.first_scheduled = started
        try:
            sampled = self._run(chunks)
            outputs: Outputs = list(self._postprocess(chunks, sampled))
        except (RuntimeError, ValueError) as error:
            outputs = self._fail(chunks, error)
        self._audit_when_idle()
        self._iteration += 1
        self._latency_ms = (time.monotonic() - started) * 1e3
        self._last = _batching(chunks, self.scheduler.preemptions - preemptions)
        return outputs

    def stats(self) -> IterationStats:
        """The engine as it is now, with the figures of its last step."""
        pool, scheduler = self.pool, self.scheduler
        looked_up = pool.reused + pool.missed
        return IterationStats(
            timestamp=time.time(),
            iteration=self._iteration,
            iter_latency_ms=self._latency_ms,
            num_active_requests=len(scheduler.running),
            num_queued_requests=len(scheduler.waiting),
            num_completed_requests=self._completed,
            max_num_active_requests=self._max_num_seqs,
            num_aborted_requests=self._aborted,
            num_preemptions=scheduler.preemptions,
            inflight_batching_stats=self._last if self.busy else InflightBatchingStats(),
            kv_cache_stats=KvCacheStats(
                max_num_blocks=pool.num_blocks,
                free_num_blocks=pool.available,
                used_num_blocks=pool.used,
                tokens_per_block=pool.block_size,
                alloc_total_blocks=pool.alloc_total,
                alloc_new_blocks=pool.alloc_new,
                reused_blocks=pool.reused,
                missed_blocks=pool.missed,
                cache_hit_rate=pool.reused / looked_up if looked_up else 0.0,
            ),
        )

    def _audit_when_idle(self) -> None:
        if not self.busy:
            self.scheduler.audit()

    def _publish(self, data: EventData) -> None:
        self._publish_event(KvEvent(self._event_id, data, window_size=self.model.context_length))
        self._event_id += 1

    def _run(self, chunks: Sequence_[Chunk]) -> list[Sampled]:
        """Forward, prompt log-probabilities, sampling; one result for each chunk that samples, in order."""
        prompt_rows, sample_rows, row = [list[int]() for _ in chunks], [], 0
        for chunk, rows in zip(chunks, prompt_rows, strict=True):
            if chunk.sequence.wants_prompt_logprobs:
                rows += range(row, row + min(chunk.length, chunk.sequence.num_prompt - 1 - chunk.start))
            if chunk.samples:
                sample_rows.append(row + chunk.length - 1)
            row += chunk.length
        flat = [row for rows in prompt_rows for row in rows]
        logits = self.model.forward(chunks, [*flat, *sample_rows])
        with torch.inference_mode():
            first = 0
            for chunk, rows in zip(chunks, prompt_rows, strict=True):
                _report_prompt(chunk, logits[first : first + len(rows)])
                first += len(rows)
            states = [chunk.sequence.sampler for chunk in chunks if chunk.samples]
            return self._sampler.sample(logits[first:], states) if states else []

    def _postprocess(self, chunks: Sequence_[Chunk], sampled: Sequence_[Sampled]) -> Iterator[tuple[str, Delta | EngineFailure]]:
        results = iter(sampled)
        for chunk in chunks:
            self.scheduler.computed(chunk)
            if chunk.samples:
                yield chunk.sequence.request.request_id, self._append(chunk.sequence, next(results))

    def _append(self, sequence: Sequence, sampled: Sampled) -> Delta | EngineFailure:
        """Take a sampled token into a sequence, unless it asked for none, and the sequence out of the engine if that ended it."""
        wanted = sequence.request.sampling.max_tokens > 0
        if wanted:
            sequence.tokens.append(sampled.token_id)
            sequence.sampler.accept(sampled.token_id)
            if sequence.sampler.error:
                self.abort(sequence.request.request_id)
                return EngineFailure(sequence.sampler.error)
        finish, stop = self._finish(sequence, sampled.token_id)
        if finish:
            del self._sequences[sequence.request.request_id]
            self.scheduler.remove(sequence)
            self._completed += 1
        prompt = None
        if not sequence.reported:
            sequence.reported = True
            prompt = _prompt_report(sequence)
        if not wanted:
            return Delta((), finish_reason=finish, prompt=prompt)
        return Delta((sampled.token_id,), (sampled.logprobs,) if sampled.logprobs is not None else (), finish, stop, prompt)

    def _finish(self, sequence: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        sampling = sequence.request.sampling
        if sequence.num_output > sampling.min_tokens:
            if token in sampling.stop_token_ids:
                return "stop", token
            # A grammar lets the end of sequence through only when the output is complete: nothing could follow it.
            if token in self.model.eos_token_ids and (sampling.guide is not None or not sampling.ignore_eos):
                return "stop", None
        if sequence.num_output >= sampling.max_tokens or len(sequence.tokens) >= self.model.context_length:
            return "length", None
        return None, None

    def _fail(self, chunks: Sequence_[Chunk], error: Exception) -> Outputs:
        failures: Outputs = []
        for chunk in chunks:
            request_id = chunk.sequence.request.request_id
            if self._sequences.pop(request_id, None):
                self.scheduler.remove(chunk.sequence)
                failure = EngineFailure(f"the engine failed on this request: {type(error).__name__}")
                failure.__cause__ = error
                failures.append((request_id, failure))
        return failures


def _report_prompt(chunk: Chunk, logits: torch.Tensor) -> None:
    """Append the log-probabilities of the prompt tokens that the chunk's rows predict, skipping those known from before a preemption."""
    sequence = chunk.sequence
    if not len(logits):
        return
    assert sequence.prompt_logprobs is not None
    known = max(0, len(sequence.prompt_logprobs) - 1 - chunk.start)
    first = chunk.start + known + 1
    targets = sequence.tokens[first : chunk.start + len(logits) + 1]
    sequence.prompt_logprobs += prompt_logprobs(logits[known:], targets, sequence.request.sampling.prompt_logprobs or 0)


def _prompt_report(sequence: Sequence) -> PromptReport:
    assert sequence.first_scheduled is not None
    logprobs = None if sequence.prompt_logprobs is None else tuple(sequence.prompt_logprobs)
    return PromptReport(sequence.cached_tokens, sequence.first_scheduled - sequence.arrival, logprobs)


def _batching(chunks: Sequence_[Chunk], preempted: int) -> InflightBatchingStats:
    prefills = [chunk for chunk in chunks if chunk.start + 1 < chunk.sequence.num_prompt]
    decodes = len(chunks) - len(prefills)
    return InflightBatchingStats(
        num_scheduled_requests=len(chunks),
        num_context_requests=len(prefills),
        num_gen_requests=decodes,
        num_paused_requests=preempted,
        num_ctx_tokens=sum(chunk.length for chunk in prefills),
        avg_num_decoded_tokens_per_iter=1.0 if decodes else 0.0,
    )
