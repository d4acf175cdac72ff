"""The engine's turn: schedule, run, postprocess. Synchronous and owned by one thread; `engine/embedded/engine.py` drives it."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from functools import partial

import torch

from engine.config import EmbeddedConfig
from engine.embedded.handoff.fetches import Fetches
from engine.embedded.handoff.leases import Leases
from engine.embedded.handoff.state import held_of, layout_of
from engine.embedded.kv.blocks import BlockPool, EventData
from engine.embedded.kv.groups import BlockGroups
from engine.embedded.models.embeddings import NO_IMAGES, PromptImages, lost_chunks
from engine.embedded.models.load import load_model
from engine.embedded.reports import batching, ending, failure_of, prompt_report
from engine.embedded.rows import prompt_rows, report_prompts, sample_rows
from engine.embedded.sampling.sampler import Drawn, Sampled, Sampler
from engine.embedded.scheduler import Chunk, Scheduler, note_pending
from engine.embedded.sequence import Sequence
from engine.errors import EngineFailure, EngineUnavailable
from engine.kv_events import KvEvent
from engine.stats import InflightBatchingStats, IterationStats
from engine.transfer.transfers import Transfers
from engine.types import Delta, Held

Outputs = list[tuple[str, Delta | EngineFailure | EngineUnavailable]]
"""What a step has for each request id that it touched."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that the device has been given."""

    chunks: Sequence_[Chunk]
    drawn: Drawn
    """The tokens of the chunks that sample, in order: of none, it is still what tells when the device is done."""
    started: float


class EngineCore:
    """Model, block pools, scheduler and sampler, and the sequences that are alive."""

    def __init__(self, config: EmbeddedConfig, publish: Callable[[KvEvent], None]) -> None:
        self.model = load_model(config)
        self._publish_event = publish
        self._event_id = 0
        self.blocks = BlockGroups(
            [
                BlockPool(
                    group.num_blocks,
                    config.kv_block_size,
                    reuse=config.enable_block_reuse,
                    publish=partial(self._publish, group.window or self.model.context_length),
                    window=group.window,
                )
                for group in self.model.groups
            ]
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            chunked_prefill=config.enable_chunked_prefill,
        )
        self._sampler = Sampler(self.model.vocab_size, self.model.device, self.model.argmax)
        self._sequences: dict[str, Sequence] = {}
        self._max_num_seqs = config.max_batch_size
        self._iteration = self._completed = self._aborted = 0
        self._last = InflightBatchingStats()
        self._latency_ms = 0.0
        self.layout = layout_of(config.model, self.model.vocab_size, config.kv_block_size, self.model.memory)
        self._fetches: Fetches | None = None
        if config.kv_transfer:
            self._leases = Leases(self.model.device)
            transfers = Transfers(
                [*self.model.memory.regions, self._leases.region], config.kv_transfer, config.kv_transfer_port
            )
            self._offers = transfers.offers()
            self._fetches = Fetches(self.scheduler, transfers, self._leases, config.transfer_timeout_seconds)
        self._stalled = False
        """Whether the last step found that all sequences wait for something else than a step."""
        self._overlap = config.overlap_scheduler == "on" or (
            config.overlap_scheduler == "auto" and self.model.device.type != "cpu"
        )
        self._launched: _Step | None = None

    @property
    def busy(self) -> bool:
        """Whether a sequence has still something to say, or another replica's blocks are being read."""
        return (
            len(self._sequences) > len(self.scheduler.held)
            or self._launched is not None
            or self.poll_seconds is not None
        )

    @property
    def ready(self) -> bool:
        """Whether a step would get anywhere; if not, a command or the end of a transfer has to come first."""
        return self._launched is not None or (
            not self._stalled and bool(self.scheduler.running or self.scheduler.waiting)
        )

    @property
    def poll_seconds(self) -> float | None:
        """The longest pause between two calls of `poll`; None if there is nothing to poll."""
        return self._fetches.poll_seconds if self._fetches is not None else None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its request id must be new."""
        assert sequence.request.request_id not in self._sequences, "request ids are unique"
        self._sequences[sequence.request.request_id] = sequence
        if sequence.request.spans and self.model.takes_images is not None:
            sequence.images = PromptImages(sequence.request, self.model.takes_images)
        self.scheduler.add(sequence)
        self._stalled = False

    def abort(self, request_id: str) -> None:
        """Drop a sequence and free its blocks, at once or when no transfer writes to them any more; nothing happens if it has finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        held = sequence in self.scheduler.held
        self._completed += held
        self._aborted += not held
        if sequence.lease is not None:
            self._leases.revoke(sequence.lease)
        if self._fetches is not None and sequence in self.scheduler.fetching:
            self._fetches.abort(sequence)
        else:
            self.scheduler.remove(sequence)
        self._stalled = False
        if not self._sequences:
            self.scheduler.audit()

    def poll(self) -> bool:
        """Take note of transfers that have ended; whether one has."""
        ended = self._fetches is not None and self._fetches.poll()
        if ended:
            self._stalled = False
        return ended

    def close(self) -> None:
        """End all transfers; the core is of no use afterwards."""
        if self._fetches is not None:
            self._fetches.close()

    def step(self) -> Outputs:
        """Run one step, and return what is known by then.

        With `overlap` that is the step before: the next one is prepared and launched while the device computes, and its decodes take
        tokens which the host has yet to see. Without, launch and result follow each other; both give the same tokens.
        """
        outputs: Outputs = []
        self.poll()
        ran, preemptions = self._launched is not None, self.scheduler.preemptions
        if self._launched is not None and any(sequence.sampler.needs_history for sequence in self.scheduler.running):
            outputs += self._settle()
        previous, self._launched = self._launched, None
        launched = self._launch(outputs)
        if previous is not None:
            outputs += self._finish_step(previous)
        self._launched = launched
        if not self._overlap:
            outputs += self._settle()
        self._stalled = not (ran or launched or outputs or self.scheduler.preemptions > preemptions)
        self._begin_fetches()
        if not self._sequences:
            self.scheduler.audit()
        return outputs

    def stats(self) -> IterationStats:
        """The engine as it is now, with the figures of its last step."""
        scheduler = self.scheduler
        return IterationStats(
            timestamp=time.time(),
            iteration=self._iteration,
            iter_latency_ms=self._latency_ms,
            num_active_requests=len(scheduler.running) + len(scheduler.fetching),
            num_queued_requests=len(scheduler.waiting),
            num_completed_requests=self._completed,
            max_num_active_requests=self._max_num_seqs,
            num_aborted_requests=self._aborted,
            num_preemptions=scheduler.preemptions,
            inflight_batching_stats=self._last if self._sequences else InflightBatchingStats(),
            kv_cache_stats=self.blocks.stats(),
            num_held_requests=len(scheduler.held),
            num_held_blocks=scheduler.held_blocks,
            num_fetching_requests=len(scheduler.fetching),
            **(self._fetches.stats() if self._fetches is not None else {}),
        )

    def _publish(self, window: int, data: EventData) -> None:
        self._publish_event(KvEvent(self._event_id, data, window_size=window))
        self._event_id += 1

    def _launch(self, failures: Outputs) -> "_Step | None":
        """Schedule a step and hand it to the device; None if there is nothing to run. A failure ends the sequences that take part."""
        started, preemptions = time.monotonic(), self.scheduler.preemptions
        chunks = self.model.ordered(self.scheduler.schedule())
        if lost := lost_chunks(chunks):
            failures += self._end(lost, lambda: EngineUnavailable(NO_IMAGES))
            chunks = [chunk for chunk in chunks if chunk not in lost]
        if not chunks:
            return None
        for chunk in chunks:
            if chunk.sequence.first_scheduled is None:
                chunk.sequence.first_scheduled = started
        try:
            step = self._run(chunks, started)
        except (RuntimeError, ValueError) as error:
            failures += self._fail(chunks, error)
            return None
        self._iteration += 1
        self._last = batching(chunks, self.scheduler.preemptions - preemptions)
        note_pending(chunks, 1)
        return step

    def _begin_fetches(self) -> None:
        """Start to read what the step's admissions need, now that the device is done with the step before."""
        if self._fetches is not None and (fetches := self.scheduler.take_fetches()):
            self._fetches.start(fetches)
            self._stalled = False
            self.poll()

    def _settle(self) -> Outputs:
        """Finish the step under way."""
        step, self._launched = self._launched, None
        return [] if step is None else self._finish_step(step)

    def _finish_step(self, step: "_Step") -> Outputs:
        """Wait for a step and take its tokens into the sequences that are still alive."""
        note_pending(step.chunks, -1)
        outputs: Outputs = []
        try:
            results = iter(step.drawn.results())
            for chunk in step.chunks:
                sampled = next(results) if chunk.samples else None
                request_id = chunk.sequence.request.request_id
                if self._sequences.get(request_id) is not chunk.sequence:
                    continue
                self.scheduler.computed(chunk)
                # A prefill that lost its blocks meanwhile has nothing to hold: it is computed again.
                if sampled is not None and (chunk.current or not chunk.sequence.request.prefill_only):
                    outputs.append((request_id, self._append(chunk.sequence, sampled)))
        except (RuntimeError, ValueError) as error:
            outputs += self._fail(step.chunks, error)
        self._latency_ms = (time.monotonic() - step.started) * 1e3
        return outputs

    def _run(self, chunks: Sequence_[Chunk], started: float) -> "_Step":
        """Forward, prompt log-probabilities, sampling."""
        logits = self.model.forward(chunks, [*prompt_rows(chunks), *sample_rows(chunks)])
        with torch.inference_mode():
            first = report_prompts(chunks, logits)
            sampling = [chunk.sequence for chunk in chunks if chunk.samples]
            if not sampling:
                return _Step(chunks, Drawn(torch.empty(0, dtype=torch.int64, device=logits.device)), started)
            drawn = self._sampler.draw(logits[first:] if first else logits, [sequence.sampler for sequence in sampling])
            if self._overlap:
                self.model.remember([sequence.slot for sequence in sampling], drawn.tokens)
            return _Step(chunks, drawn, started)

    def _append(self, sequence: Sequence, sampled: Sampled) -> Delta | EngineFailure:
        """Take a sampled token into a sequence, unless it asked for none, and the sequence out of the engine if that ended it."""
        wanted = sequence.request.sampling.max_tokens > 0
        if wanted:
            sequence.tokens.append(sampled.token_id)
            sequence.sampler.accept(sampled.token_id)
            if sequence.sampler.error:
                self.abort(sequence.request.request_id)
                return EngineFailure(sequence.sampler.error)
        finish, stop = ending(sequence, sampled.token_id, self.model.eos_token_ids, self.model.context_length)
        if finish is not None:
            del self._sequences[sequence.request.request_id]
            self.scheduler.remove(sequence)
            self._completed += 1
        prompt = None
        if not sequence.reported:
            sequence.reported = True
            prompt = prompt_report(sequence)
        if not wanted:
            return Delta((), finish_reason=finish, prompt=prompt)
        held = self._hold(sequence) if sequence.request.prefill_only and finish is None else None
        return Delta(
            (sampled.token_id,), () if sampled.logprobs is None else (sampled.logprobs,), finish, stop, prompt, held
        )

    def _hold(self, sequence: Sequence) -> Held:
        """Keep the blocks of a sequence whose prompt is computed, until it is aborted."""
        self.scheduler.hold(sequence)
        sequence.lease = self._leases.grant()
        return held_of(self.layout, sequence.tables, self._offers, sequence.lease)

    def _fail(self, chunks: Sequence_[Chunk], error: Exception) -> Outputs:
        """End the sequences of a failed step. Raises if the device itself is broken, since every later step would fail too."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return self._end(chunks, lambda: failure_of(error))

    def _end(self, chunks: Sequence_[Chunk], error: Callable[[], EngineFailure | EngineUnavailable]) -> Outputs:
        """End the sequences of chunks that are still alive."""
        alive = {chunk.sequence.request.request_id: chunk.sequence for chunk in chunks}
        alive = {
            request_id: sequence
            for request_id, sequence in alive.items()
            if self._sequences.get(request_id) is sequence
        }
        for request_id, sequence in alive.items():
            del self._sequences[request_id]
            self.scheduler.remove(sequence)
        return [(request_id, error()) for request_id in alive]
