"""An engine without a model: deterministic and fast. It keeps every promise of `engine/base.py`.

It echoes the prompt: output token i is `prompt_token_ids[i % len(prompt)]`. End-of-sequence ids, which a chat template
puts into every prompt, are skipped unless the request ignores them or lists them in `stop_token_ids`. Other sampling
parameters have no effect. For a prompt with images, the echo starts with the first eight digits of each image's key,
one token each. With a script, requests get its answers in turn, each with an end of sequence, and guides have no effect
either. Its handoff is a digest of prompt, images and first token, which the receiving engine checks.
"""

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import dataclass, field
from hashlib import blake2b

from msgspec.structs import replace

from engine.base import DeltaStream, Latest
from engine.config import FakeConfig, Tag
from engine.errors import EngineError, EngineNotReady, EngineUnavailable, InvalidRequest, NotSupported
from engine.fake.blocks import FakeBlocks, FakeSequenceBlocks
from engine.kit.checks import check_prompt, output_here
from engine.kit.kv_log import KvEventLog
from engine.kit.reasoning import ReasoningProgress
from engine.kv_events import KvEvent
from engine.media import Unexpanded
from engine.stats import InflightBatchingStats, IterationStats
from engine.types import (
    GUIDE_KINDS,
    Delta,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Handoff,
    Held,
    Logprob,
    NextHandoff,
    PromptReport,
    TokenLogprobs,
)

BACKEND = "fake"


@dataclass(eq=False, slots=True)
class FakeSequence:
    """A request, its tokens so far and its next ones."""

    request: GenerateRequest
    received: float
    tokens: list[int]
    """Prompt and output."""
    echo: tuple[int, ...]
    stops: frozenset[int]
    """All ids that end this sequence."""
    num_blocks: int
    """Maximum number of blocks it can need."""
    stream: DeltaStream = field(init=False)
    blocks: FakeSequenceBlocks | None = None
    cursor: int = 0
    announced: bool = False
    """Whether an early handoff has been made, one step before the first token."""
    started: bool = False
    """Whether its prompt has been computed."""
    reasoning: ReasoningProgress | None = None
    echoed: ReasoningProgress | None = None
    """The echo's progress as if reasoning had no budget. `reasoning` has the rest of the budget; both are None without
    one."""

    def take(self, handoff: Handoff) -> None:
        """Continue after the first token of a handoff."""
        for token in handoff.first.token_ids:
            self.next_token()
            self.tokens.append(token)

    def next_token(self) -> int:
        """Return the next id: the echo's, or that which ends reasoning whose budget is spent."""
        if self.reasoning is None or self.echoed is None:
            return self._echoed()
        token = self.reasoning.forced
        if token is not None:
            self._leave_out()
        if token is None:
            token = self._echoed()
            self.echoed.accept(token)
        self.reasoning.accept(token)
        return token

    def _leave_out(self) -> None:
        """Leave the rest of the reasoning, if it ends, out of the echo."""
        assert self.echoed is not None
        for _ in self.echo:
            if not self.echoed.inside or self.echo[self.cursor % len(self.echo)] in self.stops:
                break
            self.echoed.accept(self._echoed())

    def _echoed(self) -> int:
        """Return the next id of the echo; before `min_tokens`, the next one that does not end the sequence."""
        output = len(self.tokens) - len(self.request.prompt_token_ids)
        for _ in self.echo:
            token = self.echo[self.cursor % len(self.echo)]
            self.cursor += 1
            if output >= self.request.sampling.min_tokens or token not in self.stops:
                return token
        return next(token for token in range(len(self.stops) + 1) if token not in self.stops)

    def finish(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Return finish reason and stop reason after the newest token."""
        sampling = self.request.sampling
        if token in self.stops:
            return "stop", token if token in sampling.stop_token_ids else None
        if len(self.tokens) - len(self.request.prompt_token_ids) >= sampling.max_tokens:
            return "length", None
        return None, None


class FakeEngine:
    """An engine whose steps generate one token per running sequence, `token_delay` seconds apart."""

    def __init__(self, config: FakeConfig) -> None:
        self._config = config
        self._capacity = min(config.context_length, config.num_blocks * config.block_size)
        self._started = False
        self._closed = False
        self._ticker: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._waiting: list[tuple[float, int, FakeSequence]] = []
        self._running: dict[FakeSequence, None] = {}
        self._held: dict[FakeSequence, None] = {}
        self._early: dict[str, FakeSequence] = {}
        """Sequences whose first token another replica has yet to compute, by their request ids."""
        self._reserved = 0
        self._blocks = FakeBlocks(config.num_blocks, config.block_size, config.context_length)
        self._stats: Latest[IterationStats] = Latest()
        self._received = 0
        self._scripted = 0
        """Requests that have got an answer of the script."""
        self._iteration = 0
        self._completed = 0
        self._aborted = 0
        self.released: set[Tag] = set()
        """Memory that is released while the engine sleeps."""

    @property
    def info(self) -> EngineInfo:
        if not self._started:
            raise EngineNotReady("the engine has not started")
        config = self._config
        return EngineInfo(
            backend=BACKEND,
            model=config.model,
            dtype="none",
            device="none",
            context_length=config.context_length,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_seqs * config.context_length,
            capacity=self._capacity if self._capacity < config.context_length else 0,
            guides=GUIDE_KINDS if config.script else (),
            text_grammars=bool(config.script),
        )

    @property
    def healthy(self) -> bool:
        return self._started and not self._closed

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._run(), name="fake-engine")
        self._started = True
        self._publish(0.0, 0, 0)

    def generate(self, request: GenerateRequest) -> DeltaStream:
        assert not self.released, "a sleeping engine gets no requests"
        if not self.healthy:
            return DeltaStream.failed(
                EngineNotReady("the engine is closed" if self._closed else "the engine has not started")
            )
        try:
            sequence = self._sequence(request)
        except EngineError as error:
            return DeltaStream.failed(error)
        sequence.stream = DeltaStream(lambda: self._abort(sequence))
        if request.handoff is not None and request.handoff.early:
            self._early[request.request_id] = sequence
        else:
            self._queue(sequence)
        return sequence.stream

    def _queue(self, sequence: FakeSequence) -> None:
        heapq.heappush(self._waiting, (sequence.request.rank(sequence.received), self._received, sequence))
        self._received += 1
        self._work.set()

    @property
    def events(self) -> KvEventLog:
        """KV events of the simulated cache."""
        return self._blocks.events

    def kv_events(self) -> AsyncGenerator[list[KvEvent], None]:
        return self._blocks.events.batches()

    async def reset_prefix_cache(self) -> None:
        self._blocks.clear()

    def sleep_obstacle(self, level: int) -> str:
        return ""

    async def release_memory(self, tags: Collection[Tag], level: int) -> None:
        """Forget the blocks, and note what is released: there is no memory."""
        assert not (self._running or self._held or self._waiting), "memory is released while nothing runs"
        if "kv_cache" in tags:
            self._blocks.clear()
        self.released |= set(tags)

    async def resume_memory(self, tags: Collection[Tag]) -> None:
        self.released -= set(tags)

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    async def continue_handoff(self, following: NextHandoff) -> bool:
        if (sequence := self._early.get(following.request_id)) is None:
            return False
        if not following.handoff.early:
            del self._early[following.request_id]
            sequence.request = replace(sequence.request, handoff=following.handoff)
            try:
                _check_handoff(sequence.request)
            except EngineError as error:
                sequence.stream.fail(error)
                return True
            sequence.take(following.handoff)
            self._queue(sequence)
        return True

    async def start_profile(self) -> None:
        raise NotSupported("the fake engine computes nothing that could be profiled")

    async def stop_profile(self, trace: str) -> None:
        await self.start_profile()

    @property
    def waiting(self) -> int:
        """Requests that wait for the next step."""
        return len(self._waiting)

    @property
    def block_hashes(self) -> set[int]:
        """Hashes of the whole blocks in the KV cache."""
        return self._blocks.hashes

    def stats(self) -> AsyncIterator[IterationStats]:
        return self._stats.values()

    async def close(self) -> None:
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
        for sequence in [*self._early.values(), *self._running, *self._held, *(entry[2] for entry in self._waiting)]:
            sequence.stream.fail(EngineNotReady("the engine is closing"))
            self._release(sequence)
        self._early.clear()
        self._waiting.clear()
        self._stats.close()
        self._blocks.events.close()

    def _sequence(self, request: GenerateRequest) -> FakeSequence:
        """Make the sequence of a request. Raises InvalidRequest and EngineUnavailable."""
        config, sampling = self._config, request.sampling
        check_prompt(request, config.vocab_size, self._capacity)
        if sampling.guide is not None and not config.script:
            raise InvalidRequest(f"the fake engine cannot do guided decoding ({sampling.guide.kind})", "guide")
        _check_media(request)
        _check_handoff(request)
        most = len(request.prompt_token_ids) + output_here(request)
        sequence = _sequence_of(request, config, self._scripted, num_blocks=-(-most // config.block_size))
        self._scripted += 1
        return sequence

    async def _run(self) -> None:
        while True:
            started = time.perf_counter()
            admitted = self._admit()
            if not self._running:  # waiting requests, if any, wait for held blocks
                self._work.clear()
                await self._work.wait()
                continue
            scheduled = len(self._running)
            for sequence in list(self._running):
                self._step(sequence)
            self._iteration += 1
            self._publish(time.perf_counter() - started, scheduled, admitted)
            await asyncio.sleep(self._config.token_delay)

    def _admit(self) -> int:
        """Start waiting sequences in order, as long as they fit; return how many."""
        admitted = 0
        while self._waiting and len(self._running) < self._config.max_num_seqs:
            sequence = self._waiting[0][2]
            if self._reserved + sequence.num_blocks > self._config.num_blocks:
                break
            heapq.heappop(self._waiting)
            self._reserved += sequence.num_blocks
            request = sequence.request
            sequence.blocks = self._blocks.open(request.prompt_token_ids, request.cache_salt, request.spans)
            self._running[sequence] = None
            admitted += 1
        return admitted

    def _step(self, sequence: FakeSequence) -> None:
        """Fill the sequence's blocks and generate its next token."""
        request, sampling = sequence.request, sequence.request.sampling
        assert sequence.blocks is not None
        if request.early_handoff and sampling.max_tokens > 1 and not sequence.announced:
            sequence.announced = True
            sequence.stream.put(Delta((), held=Held(_state_of(request, ()), computed=len(sequence.tokens))))
            return
        prompt = (
            None if sequence.started or request.handoff is not None else self._prompt_report(sequence, sequence.blocks)
        )
        if not sequence.started or len(sequence.tokens) % self._config.block_size <= 1:
            sequence.blocks.fill(sequence.tokens)
        sequence.started = True
        if sampling.max_tokens == 0:
            delta = Delta((), finish_reason="length", prompt=prompt)
        else:
            token = sequence.next_token()
            sequence.tokens.append(token)
            finish, stop = sequence.finish(token)
            logprobs = () if sampling.logprobs is None else (self._logprobs(token, sampling.logprobs),)
            held = Held(_state_of(request, (token,))) if request.prefill_only and finish is None else None
            delta = Delta((token,), logprobs, finish, stop, prompt, held)
            if held is not None:
                del self._running[sequence]
                self._held[sequence] = None
        if delta.finish_reason is not None:
            self._completed += 1
            self._release(sequence)
        sequence.stream.put(delta)

    def _prompt_report(self, sequence: FakeSequence, blocks: FakeSequenceBlocks) -> PromptReport:
        request, count = sequence.request, sequence.request.sampling.prompt_logprobs
        return PromptReport(
            cached_tokens=len(blocks.keys) * self._config.block_size,
            queue_seconds=time.monotonic() - sequence.received,
            logprobs=None
            if count is None
            else (None, *(self._logprobs(token, count) for token in request.prompt_token_ids[1:])),
        )

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """Return made-up log-probabilities.

        The token has rank 1 and probability 1/2, the ids after it 1/4, 1/8 and so on.
        """
        ranked = (
            Logprob((token + i) % self._config.vocab_size, -0.6931471805599453 * (i + 1), i + 1)
            for i in range(max(count, 1))
        )
        top = tuple(ranked)
        return (top[0], *top[:count])

    def _abort(self, sequence: FakeSequence) -> None:
        if sequence in self._held:
            self._completed += 1
        else:
            self._aborted += 1
        self._early.pop(sequence.request.request_id, None)
        if sequence.blocks is None:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)
        self._release(sequence)
        self._publish(0.0, len(self._running), 0)

    def _release(self, sequence: FakeSequence) -> None:
        """Release the blocks of a sequence that has ended, if it has any."""
        if sequence.blocks is not None:
            sequence.blocks.release()
            self._running.pop(sequence, None)
            self._held.pop(sequence, None)
            self._work.set()
            self._reserved -= sequence.num_blocks

    def _publish(self, seconds: float, scheduled: int, admitted: int) -> None:
        self._stats.publish(
            IterationStats(
                timestamp=time.time(),
                iteration=self._iteration,
                iter_latency_ms=seconds * 1e3,
                num_active_requests=len(self._running),
                num_queued_requests=len(self._waiting),
                num_completed_requests=self._completed,
                max_num_active_requests=self._config.max_num_seqs,
                kv_cache_stats=self._blocks.stats(),
                inflight_batching_stats=InflightBatchingStats(
                    num_scheduled_requests=scheduled,
                    num_context_requests=admitted,
                    num_gen_requests=scheduled - admitted,
                    avg_num_decoded_tokens_per_iter=1.0 if scheduled else 0.0,
                ),
                num_aborted_requests=self._aborted,
                num_held_requests=len(self._held),
                num_held_blocks=sum(len(sequence.blocks) for sequence in self._held if sequence.blocks is not None),
            )
        )


def _sequence_of(request: GenerateRequest, config: FakeConfig, number: int, num_blocks: int) -> FakeSequence:
    """Return the sequence of the request `number`, which has passed the checks."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    stops = frozenset(sampling.stop_token_ids)
    eos = frozenset() if sampling.ignore_eos else frozenset(config.eos_token_ids)
    answer = config.script[number % len(config.script)] if config.script else ()
    full = (*_digits_of_images(request, config.vocab_size), *prompt)
    sequence = FakeSequence(
        request=request,
        received=time.monotonic(),
        tokens=list(prompt),
        echo=(*answer, *config.eos_token_ids[:1])
        if config.script
        else tuple(token for token in full if token not in eos or token in stops) or full,
        stops=stops | eos,
        num_blocks=num_blocks,
    )
    if (budget := sampling.reasoning_budget) is not None:
        sequence.reasoning = ReasoningProgress(budget)
        sequence.echoed = ReasoningProgress(replace(budget, tokens=sampling.max_tokens))
    if request.handoff is not None:
        sequence.take(request.handoff)
    return sequence


def _state_of(request: GenerateRequest, first: tuple[int, ...]) -> bytes:
    """Return the state of a handoff after the first token."""
    images = [(image.key, image.start, image.length) for image in request.spans]
    return blake2b(repr((request.prompt_token_ids, images, first)).encode(), digest_size=16).digest()


def _check_media(request: GenerateRequest) -> None:
    """Check the media of a prompt that has passed `check_prompt`.

    Raises InvalidRequest for media that are not encoded, and EngineUnavailable for embeddings that are lost.
    """
    if isinstance(request.media, Unexpanded):
        raise InvalidRequest("the fake engine takes images as embeddings alone", "prompt")
    reads = request.handoff is not None and request.handoff.state
    if not reads and not all(image.data for image in request.spans):
        raise EngineUnavailable("the images' embeddings are not here, so that the prompt cannot be computed")


def _check_handoff(request: GenerateRequest) -> None:
    """Check a handoff. Raises InvalidRequest for one from another kind of engine or of another prompt."""
    handoff = request.handoff
    if handoff is None:
        return
    if handoff.backend != BACKEND:
        raise InvalidRequest(f"the handoff is of the {handoff.backend} engine; this replica runs {BACKEND}", "handoff")
    if handoff.state and handoff.state != _state_of(request, handoff.first.token_ids):
        raise InvalidRequest("the handoff is of another prompt", "handoff")


def _digits_of_images(request: GenerateRequest, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that stand for the images: digits, in the byte tokenizer's vocabulary."""
    return tuple((ord(digit) + 3) % vocab_size for image in request.spans for digit in image.key[:8])
