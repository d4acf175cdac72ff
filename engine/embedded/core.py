"""The engine's step: schedule, launch, finish. Synchronous and owned by one thread; `engine/embedded/engine.py`
drives it."""

import inspect
import logging
import secrets
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import eq
from pathlib import Path
from typing import NamedTuple

import torch

from engine.config import EmbeddedConfig, Tag
from engine.embedded.fetches import Fetches
from engine.embedded.grammar.library import Compiled
from engine.embedded.handoff.leases import Leases
from engine.embedded.handoff.remote_source import RemoteSource, resume_further
from engine.embedded.handoff.state import layout_of
from engine.embedded.handoff.words import LeaseWords
from engine.embedded.kv.blocks import BlockPool, EventData
from engine.embedded.kv.disk_tier import digest_of
from engine.embedded.kv.groups import BlockGroups
from engine.embedded.kv.source import Source
from engine.embedded.kv.tiers import Tiers, host_slots, open_tiers
from engine.embedded.loaded_model import LoadedModel
from engine.embedded.models.devices import code_digest
from engine.embedded.models.embeddings import NO_IMAGES, PromptImages
from engine.embedded.models.heads import ROUND_DRAFTS, ROUND_TOKENS
from engine.embedded.models.runner import StepInput
from engine.embedded.sampling.sampler import Drawn, Sampler, prompt_logprobs
from engine.embedded.scheduler import Scheduler
from engine.embedded.sequence import Sequence, SequenceStatus
from engine.embedded.speculation.costs import DecodeStep
from engine.embedded.step import Chunk, PromptRows, lacking_embeddings, note_pending, prompt_rows, step_input
from engine.errors import EngineError, EngineFailure, EngineUnavailable
from engine.kv_events import KvEvent
from engine.stats import InflightBatchingStats, IterationStats
from engine.transfer.transfers import Transfers
from engine.types import Delta, FinishReason, Handoff, Held, Performance, PromptReport, TokenLogprobs

log = logging.getLogger(__name__)

CPU_PROMPT_TOKENS = 64
"""Number of prompt tokens in a step on a CPU, for which every decode waits."""
CPU_MOST_PROMPT_TOKENS = 256
"""Maximum number of prompt tokens in a step where nothing decodes, or many tokens wait; still larger steps are hardly
more efficient."""
CPU_PROMPT_SECONDS = 0.25
"""About the longest duration of a step of more than `CPU_PROMPT_TOKENS` without decodes: requests that come meanwhile
wait for it."""
CPU_CROWDED_SECONDS = 0.1
"""The same beside decodes, while many tokens of prompts wait. Fewer and larger steps read the weights less often."""
CPU_REST_AFTER = 512
"""Tokens of a prompt on a CPU after which it leaves half of the time to others."""
_STORED_AT_ONCE = 32
"""Blocks that were read which become reusable in one step: a fraction of a millisecond of the host's time."""
_TIERS_PAUSE = 0.02
_TRIALS = 2
"""Steps that are timed to know what computing a prompt takes."""

Outputs = list[tuple[str, Delta | EngineFailure | EngineUnavailable]]
"""Output of a step for each request id that it touched."""


class _Clocks(NamedTuple):
    """When a step and its plan began, by the clock that measures the cost of a step."""

    planned: float
    """When the choice of drafts began."""
    began: float
    """Start time; the choice of drafts is part of it, without the time of a model that drafts."""
    planning: float
    """Seconds of that choice, without the same."""


@dataclass(slots=True)
class _LaunchedStep:
    """A step that the device has been given."""

    chunks: list[Chunk]
    sampling: list[Chunk]
    """The chunks for which tokens are sampled."""
    slots: list[int]
    """The slots of `sampling`, in order."""
    logits: torch.Tensor
    """Logits of `sampling`, in order: a row for each token that may be sampled. Of rounds, what has come of them."""
    started: float
    clocks: _Clocks
    rows: list[int] | None = None
    """The first row of each chunk of `sampling`, or None if no chunk has a draft, and so each has one row."""
    drawn: Drawn | None = None
    """The first tokens of `sampling`, or None until they are drawn. Even without tokens it tells when the device is
    done: the host is one step ahead at most. So new requests wait for two steps at most, and two buffers suffice."""
    rounds: int = 0
    """Number of rounds in which the device drafts for its chunks and draws all their tokens (`models/heads.py`)."""


@dataclass(slots=True)
class _Taken:
    """The result of a step for one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: int | None = None
    drafted: int = 0
    accepted: int = 0


class EngineCore:
    """Model runner, block pools, scheduler and sampler, and the sequences that are alive."""

    def __init__(
        self, config: EmbeddedConfig, publish: Callable[[KvEvent], None], loaded: LoadedModel | None = None
    ) -> None:
        self._model = loaded or LoadedModel.load(config)
        self.runner, self.speculator = self._model.runner, self._model.speculator
        self._on_cpu = on_cpu = self.runner.device.type == "cpu"
        self._publish_event = publish
        self._event_id = 0
        num_blocks = [group.num_blocks for group in self.runner.groups]
        lower_blocks = [0] * len(num_blocks)
        if config.kv_host_cache_mb:
            lower_blocks = [*host_slots(config.kv_host_cache_mb << 20, num_blocks, self.runner.memory.block_bytes)]
        self.blocks = BlockGroups(
            [
                BlockPool(
                    group.num_blocks,
                    config.kv_block_size,
                    reuse=config.enable_block_reuse,
                    publish=partial(self._publish, group.window or self.runner.context_length),
                    window=group.window,
                    lower_blocks=lower,
                )
                for group, lower in zip(self.runner.groups, lower_blocks, strict=True)
            ]
        )
        self.layout = layout_of(config.model, self.runner.vocab_size, config.kv_block_size, self.runner.memory)
        self.remote = self._remote_source(config)
        """Other replicas as a source of KV blocks; None if this one moves none."""
        self._leases = Leases(self.remote, self.layout, early=not self.blocks.sliding)
        self.tiers = self._open_tiers(config)
        """The host and disk tiers; None without."""
        sources: list[Source] = [source for source in (self.remote, self.tiers) if source is not None]
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_prompt_tokens=CPU_PROMPT_TOKENS if on_cpu else config.max_num_tokens,
            small_step=self.runner.graph_tokens,
            rest_after=CPU_REST_AFTER if on_cpu else None,
            chunked_prefill=config.enable_chunked_prefill,
            sources=sources,
            offload=self.tiers,
        )
        self._fetches = Fetches(self.scheduler, config.transfer_timeout_seconds)
        self._sampler = self.runner.sampler or Sampler(self.runner.vocab_size, self.runner.device)
        self._sequences: dict[str, Sequence] = {}
        self._max_num_seqs = config.max_batch_size
        self._iteration = 0
        self._completed = 0
        self._aborted = 0
        self._last = InflightBatchingStats()
        self._latency_ms = 0.0
        self._stalled = False
        """Whether the last step found that all sequences wait for something else than a step."""
        self._overlap = config.overlap_scheduler == "on" or (config.overlap_scheduler == "auto" and not on_cpu)
        self._launched: _LaunchedStep | None = None
        # On a CPU a step costs its processor time: how long it takes depends on who else uses the processor.
        self._clock = time.process_time if on_cpu else time.monotonic
        self._clocks = _Clocks(0.0, 0.0, 0.0)
        """Those of the present step."""
        self._finished = 0.0
        """End of the last step, by that clock."""

    @property
    def busy(self) -> bool:
        """Whether a sequence has still something to say, or blocks are being read."""
        return (
            len(self._sequences) > len(self.scheduler.held)
            or self._launched is not None
            or self.poll_seconds is not None
        )

    @property
    def ready(self) -> bool:
        """Whether a step would get anywhere; if not, a command or the end of a reading has to come first."""
        if self._launched is not None or self._fetches.lost:
            return True
        return not self._stalled and bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def poll_seconds(self) -> float | None:
        """The longest pause between two calls of `poll`; None if there is nothing to poll."""
        if self._fetches.poll_seconds is None and self.tiers is not None and self.tiers.working:
            return _TIERS_PAUSE
        return self._fetches.poll_seconds

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its request id must be new."""
        assert sequence.request.request_id not in self._sequences, "request ids are unique"
        self._sequences[sequence.request.request_id] = sequence
        if sequence.request.spans and self.runner.takes_images is not None:
            sequence.images = PromptImages(sequence.request, self.runner.takes_images)
        self.scheduler.add(sequence)
        self._stalled = False

    def begin(self, request_id: str, compiled: Compiled) -> None:
        """Give a sequence its grammar; it may sample from now on. Does nothing if it has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.sampler.matcher is not None:
            sequence.sampler.matcher.begin(compiled)
            sequence.lacks_grammar = False
            self._stalled = False

    def continue_handoff(self, request_id: str, handoff: Handoff) -> None:
        """Have a sequence with an early handoff continue from a later one. Does nothing if it has ended, or has its
        first token. Raises as `resume` does; the sequence is dropped then."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.lacks_first or sequence.status is SequenceStatus.FINISHED:
            return
        try:
            resume_further(sequence, handoff, self.layout)
        except EngineError:
            self.abort(request_id)
            raise
        self.poll()
        if sequence.status is not SequenceStatus.FETCHING:  # else a step gets nowhere before it has been read
            self._stalled = False

    def abort(self, request_id: str) -> None:
        """Drop a sequence and free its blocks, at once or when nothing writes to them any more. Does nothing if it
        has finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self._forget(sequence)
        if sequence.status is SequenceStatus.HELD:
            self._completed += 1
        else:
            self._aborted += 1
        if sequence.status is SequenceStatus.FETCHING:
            self._fetches.abort(sequence)
        elif sequence.status is SequenceStatus.FINISHED:  # nobody has been told yet that its blocks cannot be read
            self._fetches.lost = [lost for lost in self._fetches.lost if lost[0] is not sequence]
        else:
            self.scheduler.remove(sequence)
        self._stalled = False
        if not self._sequences:
            self.scheduler.audit()

    def poll(self) -> bool:
        """Take note of readings that have ended, and of what tiers have done; return whether there was anything."""
        changed = self.tiers is not None and self.tiers.poll()
        ended = self._fetches.poll()
        if ended:
            self._stalled = False
        return ended or changed

    def close(self) -> None:
        """End all transfers and wait for that, since they write to the runner's memory; the core is of no use
        afterwards."""
        self._model.close()
        if self.remote is not None:
            self.remote.transfers.close()
        if self.tiers is not None:
            self.tiers.close()

    def reset_prefix_cache(self) -> None:
        """Forget every reusable block, in all tiers; sequences that run keep theirs."""
        self._forget_refuted(self._fetches.confirm())
        self.scheduler.store_fetched()  # or they would become reusable afterwards
        if self.tiers is not None:
            self.tiers.clear()
        for pool in self.blocks.pools:
            pool.clear()

    def release_memory(self, tags: Collection[Tag], level: int) -> bool:
        """Give back unused memory; return False if a sequence has not ended yet, or its blocks are still copied."""
        self.poll()  # who asks again and again keeps the engine's thread from polling
        copied = self._fetches.poll_seconds is not None or (self.tiers is not None and self.tiers.copying)
        if self._sequences or self._launched is not None or copied:
            return False
        if "kv_cache" in tags:
            for pool in self.blocks.pools:
                if self.tiers is not None:
                    pool.evict()
                else:
                    pool.clear()
        self._model.release_memory(tags, level)
        return True

    def resume_memory(self, tags: Collection[Tag]) -> None:
        """Take memory again; all KV blocks are empty. Raises EngineFailure."""
        self._model.resume_memory(tags)

    def step(self) -> Outputs:
        """Run one step, and return what is known by then.

        With overlap that is the step before: the next one is prepared and launched while the device computes, and its
        decodes take tokens which the host has yet to see. What needs these tokens to be sampled, as a grammar does, is
        drawn when they have come. Without overlap, launch and result follow each other; both give the same tokens.
        """
        if torch.is_inference_mode_enabled():  # entering it once more takes as long as ten other functions
            return self._step()
        with torch.inference_mode():
            return self._step()

    def _step(self) -> Outputs:
        self.poll()
        outputs = self._end_lost()
        ran, preemptions = self._launched is not None, self.scheduler.preemptions
        if self.speculator is not None:
            planned = self._clock()
            outputs += self._plan_drafts()
            planning = self.speculator.planning
            self._clocks = _Clocks(planned, self._clock() - planning, planning)
        previous, self._launched = self._launched, None
        launched = self._launch(outputs)
        waits = previous is not None and launched is not None and self._waits(launched)
        if launched is not None and not waits and not self._draw(launched, outputs):
            launched = None
        self.scheduler.store_fetched(_STORED_AT_ONCE)  # while the device computes
        if previous is not None:
            outputs += self._finish(previous)
        if launched is not None and waits and not self._draw(launched, outputs):
            launched = None
        self._launched = launched
        if not self._overlap:
            outputs += self._settle()
        outputs += _early(self._leases.announce())
        self._stalled = not (ran or launched or outputs or self.scheduler.preemptions > preemptions)
        self._begin_fetches()
        if not self._sequences:
            self.scheduler.audit()
        return outputs

    def stats(self) -> IterationStats:
        """Return the state of the engine, with the figures of its last step."""
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
            tiers=() if self.tiers is None else self.tiers.stats(),
            spec_decoding_stats=None if self.speculator is None else self.speculator.stats(),
            **self._fetches.stats(),
        )

    def _remote_source(self, config: EmbeddedConfig) -> RemoteSource | None:
        if not config.kv_transfer:
            return None
        words = LeaseWords(self.runner.device)
        regions = [*self.runner.memory.regions, words.region]
        return RemoteSource(Transfers(regions, config.kv_transfer, config.kv_transfer_port), words)

    def _open_tiers(self, config: EmbeddedConfig) -> Tiers | None:
        if not config.kv_host_cache_mb:
            return None
        runner = self.runner

        def digest() -> bytes:
            # Weights that are made at random belong to this engine alone.
            own = secrets.token_hex() if config.load_format == "dummy" else ""
            computed = runner.compute_path, runner.instruction_set, str(runner.dtype), config.quantization, own
            code = code_digest(Path(inspect.getfile(type(runner))).parent)
            return digest_of(Path(config.model), str(self.layout), *computed, code)

        tiers = open_tiers(config, runner.device, self.blocks, runner.memory, digest)
        tiers.measure(config.kv_block_size * self._prompt_seconds(config))
        return tiers

    def _prompt_seconds(self, config: EmbeddedConfig) -> float:
        """Return the seconds that computing a token of a prompt takes, and leave all blocks empty."""
        most = CPU_MOST_PROMPT_TOKENS if self._on_cpu else config.max_num_tokens
        room = config.kv_block_size * min(pool.num_blocks for pool in self.blocks.pools)
        count = min(most, room, self.runner.context_length, self.blocks.max_chunk)
        blocks = list(range(-(-count // config.kv_block_size)))
        seconds = float("inf")
        for _ in range(_TRIALS):
            started = time.perf_counter()
            self.runner.forward(
                StepInput(
                    tokens=[0] * count,
                    positions=list(range(count)),
                    starts=[0],
                    lengths=[count],
                    slots=[0],
                    admissions=[0],
                    tables=[[blocks] * len(self.blocks.pools)],
                    sampled=[0],
                    rows=[count - 1],
                )
            )
            if self.runner.device.type == "cuda":
                torch.cuda.synchronize(self.runner.device)
            seconds = min(seconds, (time.perf_counter() - started) / count)
        for cache in self.runner.memory.blocks:
            cache[: len(blocks)].zero_()
        return seconds

    def _publish(self, window: int, data: EventData) -> None:
        self._publish_event(KvEvent(self._event_id, data, window_size=window))
        self._event_id += 1

    def _plan_drafts(self) -> Outputs:
        """Choose drafts for the next step, and finish the one under way if that has drafts or if it is worth waiting
        for: what a draft follows has to be known."""
        assert self.speculator is not None
        waits = self._launched is not None and self._launched.rows is not None
        outputs = self._settle() if waits else []
        if not self.speculator.next_step(len(self.scheduler.running)):
            return outputs
        if self._choose_drafts() and self._launched is not None:
            outputs += self._settle()
            self._choose_drafts()
        return outputs

    def _choose_drafts(self) -> bool:
        """Have the speculator choose drafts; return whether there are any."""
        assert self.speculator is not None
        running = self.scheduler.running
        sequences = [s for s in running if self._sampler.takes_drafts(s.sampler)]
        rounds = self.speculator.wants_rounds(len(running)) and self.scheduler.settled
        rounds = rounds and all(self._sampler.draws_alone(s.sampler) for s in running)
        return self.speculator.plan(sequences, rounds)

    def _launch(self, failures: Outputs) -> _LaunchedStep | None:
        """Schedule a step and hand it to the device; None if there is nothing to run. A failure ends the sequences
        that take part."""
        started, preemptions = time.monotonic(), self.scheduler.preemptions
        chunks = self.scheduler.schedule(self.runner.most_tokens)
        if self.scheduler.preemptions != preemptions:
            failures += _early(self._leases.take_back())
        if self.runner.takes_images is not None and (lost := lacking_embeddings(chunks)):
            failures += self._end(lost, lambda: EngineUnavailable(NO_IMAGES))
            chunks = [chunk for chunk in chunks if chunk not in lost]
        if not chunks:
            return None
        rounds = 0
        if self.speculator is not None and self.speculator.rounds:
            rounds, chunks = self.scheduler.fit_rounds(chunks, self.speculator.planned, self.speculator.rounds)
        for chunk in chunks:
            if chunk.sequence.first_scheduled is None:
                chunk.sequence.first_scheduled = started
        try:
            step = self._run_rounds(chunks, started, rounds) if rounds else self._run(chunks, started)
        except (RuntimeError, ValueError) as error:
            failures += self._fail(chunks, error)
            return None
        if self._on_cpu:
            self._size_prompts(chunks, time.monotonic() - started)
        self._leases.begin(chunks)
        self._iteration += 1
        self._last = _batching(chunks, self.scheduler.preemptions - preemptions)
        return step

    def _size_prompts(self, chunks: list[Chunk], seconds: float) -> None:
        """Let prompts take as many tokens of a large step as this step could have computed in the time of such."""

        def affordable(most: float) -> int:
            return min(max(int(tokens * most / seconds), CPU_PROMPT_TOKENS), CPU_MOST_PROMPT_TOKENS)

        tokens = sum(chunk.length for chunk in chunks)
        if tokens >= CPU_PROMPT_TOKENS:
            self.scheduler.prompt_tokens_alone = affordable(CPU_PROMPT_SECONDS)
            self.scheduler.prompt_tokens_crowded = affordable(CPU_CROWDED_SECONDS)

    def _run(self, chunks: list[Chunk], started: float) -> _LaunchedStep:
        """Forward and prompt log-probabilities."""
        reported = prompt_rows(chunks)
        sampling = [chunk for chunk in chunks if chunk.sampled]
        slots = [chunk.sequence.slot for chunk in sampling]
        self._sampler.enter(
            slots, [chunk.admission for chunk in sampling], [chunk.sequence.sampler for chunk in sampling]
        )
        step = step_input(chunks, reported, self.runner.dtype, self.runner.device)
        logits = self.runner.forward(step)
        if self.speculator is not None and self.runner.hidden is not None:
            self.speculator.read(step, self.runner.hidden)
        first = _report_prompts(reported, logits) if reported else 0
        rows = None
        if any(chunk.draft for chunk in sampling):
            rows = list(accumulate((chunk.sampled for chunk in sampling[:-1]), initial=0))
        logits = logits[first:] if first else logits
        return _LaunchedStep(chunks, sampling, slots, logits, started, self._clocks, rows)

    def _run_rounds(self, chunks: list[Chunk], started: float, rounds: int) -> _LaunchedStep:
        """Have the device draft, verify and draw so many times; all chunks are decodes."""
        assert self.speculator is not None
        sequences = [chunk.sequence for chunk in chunks]
        slots, admissions = [s.slot for s in sequences], [s.admission for s in sequences]
        self._sampler.enter(slots, admissions, [s.sampler for s in sequences])
        for sequence in sequences:
            self.runner.expect(sequence.slot, sequence.admission, sequence.tables)
        found = self.speculator.run_rounds(sequences, rounds)
        rows = list(range(0, sum(chunk.length for chunk in chunks), rounds * ROUND_TOKENS))
        return _LaunchedStep(chunks, chunks, slots, found, started, self._clocks, rows, Drawn(found), rounds)

    def _waits(self, step: _LaunchedStep) -> bool:
        """Return whether tokens that the host has not seen yet are needed to draw those of a step."""
        return self._sampler.waits([chunk.sequence.sampler for chunk in step.sampling])

    def _draw(self, step: _LaunchedStep, failures: Outputs) -> bool:
        """Sample the tokens of a step; return whether that succeeded. A failure ends the sequences that take part."""
        states = [chunk.sequence.sampler for chunk in step.sampling]
        try:
            if not states:
                step.drawn = Drawn(torch.empty(0, dtype=torch.int64, device=step.logits.device))
            elif not step.rounds:  # else the device has drawn
                step.drawn = self._sampler.draw(step.logits, states, step.slots, step.rows)
                if self._overlap and step.rows is None:  # else the host has its tokens before the next step
                    self.runner.remember(step.slots, step.drawn.tokens)
        except (RuntimeError, ValueError) as error:
            failures += self._fail(step.chunks, error)
            return False
        note_pending(step.sampling, 1)
        return True

    def _begin_fetches(self) -> None:
        """Start to read what the step's admissions need, now that the device is done with the step before."""
        if fetches := self.scheduler.take_fetches():
            if self.tiers is not None:
                self.tiers.land()
            self._fetches.land()
            self._fetches.start(fetches)
            self._stalled = False
            for fetch in fetches:
                self._expect(fetch.sequence)
            self.poll()

    def _expect(self, sequence: Sequence) -> None:
        """Prepare for a sequence whose blocks are being read, so that it runs as soon as they are here."""
        if sequence.status is not SequenceStatus.FETCHING:
            return
        slots, admissions = [sequence.slot], [sequence.admission]
        with suppress(RuntimeError):  # as when memory is short: its step tries again, and may fail
            self.runner.expect(sequence.slot, sequence.admission, sequence.tables)
            if sequence.sampler.matcher is None:
                self._sampler.enter(slots, admissions, [sequence.sampler])

    def _settle(self) -> Outputs:
        """Finish the step under way."""
        step, self._launched = self._launched, None
        return [] if step is None else self._finish(step)

    def _finish(self, step: _LaunchedStep) -> Outputs:
        """Wait for a step and add its tokens to the sequences that are still alive."""
        assert step.drawn is not None
        note_pending(step.sampling, -1)
        outputs: Outputs = []
        taken: dict[Sequence, _Taken] | None = None
        self._forget_refuted(self._fetches.confirm(step.chunks))
        try:
            taken = self._take_rounds(step) if step.rounds else self._take(step, step.drawn)
            chunks = step.chunks if step.rows is None else self._verified(step.chunks, taken, step.rounds)
            self.scheduler.computed(chunks)
            self._leases.note_written(chunks)
            for sequence, found in taken.items():
                outputs.append((sequence.request.request_id, self._answer(sequence, found)))
            if step.rounds and self.speculator is not None:
                self.speculator.end_rounds([chunk.sequence for chunk in step.chunks if chunk.current])
        except (RuntimeError, ValueError) as error:
            taken = None
            outputs += self._fail(step.chunks, error)
        now = time.monotonic()
        self._latency_ms = (now - step.started) * 1e3
        if self.speculator is not None:
            self._note_duration(step, taken)
        return outputs

    def _note_duration(self, step: _LaunchedStep, taken: dict[Sequence, _Taken] | None) -> None:
        """Let the speculator know how long a step without prompts took that did not fail."""
        assert self.speculator is not None
        clock, before = self._clock(), self._finished
        self._finished = clock
        # With overlap, a step that began behind the end of the last one waited to know what drafts follow.
        waited = step.rows is not None or (self._overlap and step.clocks.began >= before)
        if taken is None or not self.speculator.measures(len(step.chunks), waited=waited):
            return
        if any(chunk.sampled != chunk.length for chunk in step.chunks):
            return
        decoded = DecodeStep(
            sequences=len(step.chunks),
            rows=sum(chunk.length for chunk in step.chunks),
            tokens=sum(len(found.tokens) for found in taken.values()) + len(step.chunks) - len(taken),
            waited=waited,
            seconds=clock - max(step.clocks.began, before),
            elapsed=clock - max(step.clocks.planned, before),
            planning=step.clocks.planning,
            rounds=step.rounds,
        )
        self.speculator.note_step(decoded)

    def _take(self, step: _LaunchedStep, drawn: Drawn) -> dict[Sequence, _Taken]:
        """Add the drawn tokens to the sequences that are still alive.

        A drafted token that is the one drawn is in its place already, and the next one is drawn after it, as it would
        be after a step of its own; the first other one ends this. So a draft changes no token.
        """
        taken: dict[Sequence, _Taken] = {}
        eos_token_ids, context_length = self.runner.eos_token_ids, self.runner.context_length
        chunks, rows = step.sampling, step.rows or []
        while True:
            going_on: list[tuple[Chunk, int]] = []
            for index, (chunk, (tokens, logprobs)) in enumerate(zip(chunks, drawn.results(), strict=True)):
                sequence = chunk.sequence
                if sequence.status is SequenceStatus.FINISHED or chunk.admission == sequence.void:
                    continue
                # A prefill that lost its blocks meanwhile has nothing to hold: it is computed again.
                if sequence.request.prefill_only and not chunk.current:
                    continue
                found = taken.setdefault(sequence, _Taken(drafted=len(chunk.draft)))
                if drawn.ahead is not None:
                    tokens = _behind_right(chunk.draft, drawn.ahead, rows[index])
                count, found.finish, found.stop = sequence.take(tokens, eos_token_ids, context_length)
                drafted = chunk.draft[len(found.tokens) : len(found.tokens) + count]
                right = sum(map(eq, drafted, tokens))
                found.accepted += right
                found.tokens += tokens[:count]
                found.logprobs += logprobs[:count]
                if 0 < right == count and found.finish is None and not sequence.sampler.error:
                    going_on.append((chunk, rows[index] + 1))
            if not going_on:
                return taken
            chunks, rows = [chunk for chunk, _ in going_on], [row for _, row in going_on]
            states = [chunk.sequence.sampler for chunk in chunks]
            slots = [chunk.sequence.slot for chunk in chunks]
            drawn = self._sampler.draw(step.logits, states, slots, rows)

    def _take_rounds(self, step: _LaunchedStep) -> dict[Sequence, _Taken]:
        """Add the tokens of rounds to the sequences that are still alive."""
        assert self.speculator is not None and step.drawn is not None
        taken: dict[Sequence, _Taken] = {}
        eos_token_ids, context_length = self.runner.eos_token_ids, self.runner.context_length
        for chunk, rounds in zip(step.chunks, zip(*step.drawn.arrived(), strict=True), strict=True):
            sequence = chunk.sequence
            if sequence.status is SequenceStatus.FINISHED or chunk.admission == sequence.void:
                continue
            found = taken[sequence] = _Taken()
            for right, *tokens in rounds:
                count, found.finish, found.stop = sequence.take(tuple(tokens[:right]), eos_token_ids, context_length)
                found.tokens += tokens[:count]
                found.drafted += ROUND_DRAFTS
                found.accepted += min(count, right - 1)
                self.speculator.note_round(min(count, right - 1))
                if found.finish is not None or sequence.sampler.error:
                    break
        return taken

    def _verified(self, chunks: list[Chunk], taken: dict[Sequence, _Taken], rounds: int) -> list[Chunk]:
        """Return chunks without their drafted tokens that proved wrong; those of rounds have been counted."""
        assert self.speculator is not None
        left: list[Chunk] = []
        for chunk in chunks:
            if chunk.draft and (found := taken.get(chunk.sequence)) is not None:
                chunk.sequence.draft_tokens += found.drafted
                chunk.sequence.accepted_tokens += found.accepted
                if not rounds:
                    self.speculator.note_draft(chunk.sequence, found.drafted, found.accepted)
                chunk = self.scheduler.verified(chunk, len(found.tokens))
            if not chunk.draft:  # else its sequence has ended
                left.append(chunk)
        return left

    def _answer(self, sequence: Sequence, taken: _Taken) -> Delta | EngineFailure:
        """Return a step's result for a sequence as a delta, and take the sequence out of the engine if it has ended."""
        if taken.tokens and sequence.sampler.error:
            self.abort(sequence.request.request_id)
            return EngineFailure(sequence.sampler.error)
        held, performance = None, None
        if taken.finish is not None:
            self._drop(sequence)
            self._completed += 1
            if sequence.draft_tokens:
                performance = Performance(draft_tokens=sequence.draft_tokens, accepted_tokens=sequence.accepted_tokens)
        elif sequence.request.prefill_only:
            self.scheduler.hold(sequence)
            held = self._leases.hold(sequence)
        prompt = None
        if not sequence.reported:
            sequence.reported = True
            prompt = _prompt_report(sequence)
        tokens, logprobs = tuple(taken.tokens), tuple(taken.logprobs)
        drafts = taken.drafted, taken.accepted
        return Delta(tokens, logprobs, taken.finish, taken.stop, prompt, held, *drafts, performance)

    def _forget_refuted(self, sequences: list[Sequence]) -> None:
        """Drop what was drafted from blocks that were not what another replica had offered."""
        if self.speculator is not None:
            for sequence in sequences:
                self.speculator.forget(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence out of the engine that has ended."""
        del self._sequences[sequence.request.request_id]
        self._forget(sequence)
        self.scheduler.remove(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that is about to give up its blocks for good."""
        if self.speculator is not None:
            self.speculator.forget(sequence)
        self._leases.revoke(sequence)

    def _end_lost(self) -> Outputs:
        """End the sequences whose first token another replica has yet to compute and whose blocks cannot be read."""
        lost, self._fetches.lost = self._fetches.lost, []
        for sequence, _ in lost:
            del self._sequences[sequence.request.request_id]
            self._forget(sequence)
        return [
            (sequence.request.request_id, EngineUnavailable(f"KV blocks could not be read: {reason}"))
            for sequence, reason in lost
        ]

    def _fail(self, chunks: list[Chunk], error: Exception) -> Outputs:
        """End the sequences of a failed step. Raises if the device itself is broken, since every later step would
        fail too."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
        return self._end(chunks, lambda: _failure_of(error))

    def _end(self, chunks: list[Chunk], error: Callable[[], EngineFailure | EngineUnavailable]) -> Outputs:
        """End the sequences of chunks that are still alive."""
        alive = [chunk.sequence for chunk in chunks if chunk.sequence.status is not SequenceStatus.FINISHED]
        for sequence in alive:
            self._drop(sequence)
        return [(sequence.request.request_id, error()) for sequence in alive]


def _early(handoffs: list[tuple[Sequence, Held]]) -> Outputs:
    """Return early handoffs as outputs."""
    return [(sequence.request.request_id, Delta((), held=held)) for sequence, held in handoffs]


def _behind_right(draft: Many[int], drawn: Many[int], row: int) -> tuple[int, ...]:
    """Return the tokens drawn from a row on for as long as the draft is right, and the first one behind that."""
    end = row
    for token in draft:
        if drawn[end] != token:
            break
        end += 1
    return tuple(drawn[row : end + 1])


def _report_prompts(reported: list[PromptRows], logits: torch.Tensor) -> int:
    """Append the log-probabilities of prompt tokens to their sequences, except those known from before a preemption.

    The first rows of `logits` are those of `reported`; returns how many they are.
    """
    first = 0
    for (sequence, start, *_), _, count in reported:
        assert sequence.prompt_logprobs is not None
        known = max(0, len(sequence.prompt_logprobs) - 1 - start)
        targets = sequence.tokens[start + known + 1 : start + count + 1]
        asked = sequence.request.sampling.prompt_logprobs or 0
        sequence.prompt_logprobs += prompt_logprobs(logits[first + known : first + count], targets, asked)
        first += count
    return first


def _prompt_report(sequence: Sequence) -> PromptReport:
    """Return the report that goes out with the first delta of a sequence."""
    assert sequence.first_scheduled is not None
    logprobs = None if sequence.prompt_logprobs is None else tuple(sequence.prompt_logprobs)
    waited = sequence.first_scheduled - sequence.arrival
    return PromptReport(cached_tokens=sequence.cached_tokens, queue_seconds=waited, logprobs=logprobs)


def _failure_of(error: Exception) -> EngineFailure:
    """Return the error that a request gets when its step failed."""
    failure = EngineFailure(f"the engine failed on this request: {type(error).__name__}")
    failure.__cause__ = error
    return failure


def _batching(chunks: list[Chunk], preempted: int) -> InflightBatchingStats:
    """Return the figures of a step, in which `preempted` sequences were preempted."""
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
