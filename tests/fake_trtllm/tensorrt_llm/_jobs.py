"""One request in the executor.

A job has the sequences that it asks our engine for, and what their deltas say in TensorRT-LLM's terms.
"""

import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.base import DeltaStream, Engine, merge
from engine.errors import EngineError, EngineUnavailable
from engine.kit import logits
from engine.media import MediaSpan, MediaSpans
from engine.types import Delta, GenerateRequest, TokenLogprobs
from tensorrt_llm._contract import NEWEST
from tensorrt_llm._errors import RequestError
from tensorrt_llm._outputs import Logprob
from tensorrt_llm._results import GenerationResult, Response
from tensorrt_llm._test import faults
from tensorrt_llm._translate import MinLength, Processor, PromptCounts, Sampler, sampling_of, stop_ids

KV_BYTES = 16
"""Bytes of the keys and values of a token that move between context and generation workers."""
_LOST = "Error in kv cache transfer for generation requests"


@dataclass
class Job:
    """What a request needs to run. `fields` are those of our SamplingParams."""

    result: GenerationResult
    fields: dict[str, Any]
    max_tokens: int
    streaming: bool
    interval: int
    cache_salt: str
    processors: list[Any]
    sampler: Sampler
    own_processors: Sequence[MinLength | PromptCounts] = ()
    """What the sampler does, and our engines do otherwise."""
    images: tuple[MediaSpan, ...] = ()
    scheduling: Any = None
    """The request's SchedulingParams."""
    rank: int = 0
    disaggregated: Any = None
    """The request's DisaggregatedParams, if it has a type."""
    aborted: bool = False
    begun: bool = False
    begun_at: float = 0.0
    scored: set[int] = field(default_factory=set)
    """Sequences that have had a response."""
    fault: str | None = None
    """What it is to fail of, in time."""
    hang_after: int | None = None
    """After how many responses the executor is to hang."""
    silent: bool = False
    """Whether it was aborted in the waiting queue, of which nobody is told."""
    streams: list[DeltaStream] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    steps: int = 0

    @property
    def id(self) -> int:
        return self.result.request_id

    @property
    def kind(self) -> str | None:
        """Request type, None for an aggregated request."""
        return None if self.disaggregated is None else self.disaggregated.request_type

    def push(self, response: Response | Exception) -> None:
        self.result._push(response)

    async def run(self, engine: Engine, executor: Any) -> None:
        """All sequences, to their ends. One that fails fails the request."""
        names = []
        try:
            self._check()
            for position, processor in enumerate(self.processors):
                names.append(f"fake-trtllm-{id(self)}-{position}")
                logits.register(names[-1], lambda processor=processor: self._processor(processor))
            for processor in self.own_processors:
                names.append(f"fake-trtllm-{id(self)}-{type(processor).__name__}")
                logits.register(names[-1], lambda processor=processor: processor)
            async with asyncio.TaskGroup() as group:
                for index in range(self.result.sampling_params.n):
                    group.create_task(self._follow(engine, executor, index, tuple(names)))
        except* RequestError as errors:
            self.push(errors.exceptions[0])
            if NEWEST and faults.device_error is not None:  # main tells fatal errors (#12718)
                executor.die(RuntimeError(faults.device_error))
        except* AssertionError as errors:
            executor.die(RuntimeError(f"Error in event loop: {errors.exceptions[0]}"))
        except* EngineUnavailable as errors:
            executor.die(RuntimeError(str(errors.exceptions[0])))
        except* EngineError as errors:
            self.push(RequestError(str(errors.exceptions[0])))
        finally:
            for name in names:
                logits.unregister(name)

    def _processor(self, processor: Any) -> Processor:
        prompt, args = len(self.result.prompt_token_ids), self.result._executor.args
        chunks = -(-prompt // args.max_num_tokens) if args.enable_chunked_prefill and args.max_num_tokens else 1
        first = self.disaggregated.first_gen_tokens[0] if self.kind == "generation_only" else None
        overlaps = self.sampler.overlaps
        return Processor(copy.deepcopy(processor), self.id, prompt, overlaps=overlaps, chunks=chunks, first=first)

    async def abort(self, executor: Any) -> None:
        """End the sequences; those that wait for a context worker's blocks once they have them."""
        self.aborted = True
        self.silent = executor.waits(self)
        if self.begun or self.kind != "generation_only":
            for stream in self.streams:
                await stream.aclose()

    def _check(self) -> None:
        """Takes the fault that waits for this request, and a generation request's state."""
        self.fault = faults.device_error or faults.take("request_error")
        if self.max_tokens > (faults.hang_after or 0):
            self.hang_after = faults.take("hang_after")
        if self.fault is not None and (faults.device_error or not faults.request_error_after):
            raise RequestError(self.fault)
        if NEWEST and self.kind is not None:
            assert self.disaggregated.disagg_request_id is not None, "params.disagg_request_id is not None"
        if self.kind == "generation_only":
            seed, self.images = restore(self.disaggregated, self.result.prompt_token_ids)
            if self.fields["seed"] is None:
                self.fields["seed"] = seed

    async def _follow(self, engine: Engine, executor: Any, index: int, processors: tuple[str, ...]) -> None:
        seed = self.fields["seed"]
        sampling = sampling_of(
            self.fields, max_tokens=self.max_tokens, processors=processors, seed=None if seed is None else seed + index
        )
        prompt = tuple(self.result.prompt_token_ids)
        request = GenerateRequest(
            request_id=f"{self.id}-{index}",
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=self.cache_salt,
            media=MediaSpans(self.images),
        )
        stream = engine.generate(request)
        self.streams.append(stream)
        if self.aborted and self.kind != "generation_only":
            await stream.aclose()
        waiting: list[Delta] = []
        responses = 0
        if self.hang_after == 0:
            executor.freeze()
        async for delta in stream:
            if not self.begun:
                self._check_first(delta, index)
                self.begun = True
                self.begun_at = time.monotonic()
            if faults.device_error is not None:
                await stream.aclose()
                raise RequestError(faults.device_error)
            waiting.append(delta)
            ready = sum(len(part.token_ids) for part in waiting) >= self.interval
            if delta.finish_reason is not None or (self.streaming and ready):
                self.push(self._response(index, merge(waiting)))
                waiting = []
                responses += 1
                if responses == self.hang_after:
                    executor.freeze()
                if self.fault is not None and responses >= faults.request_error_after:
                    await stream.aclose()
                    raise RequestError(self.fault)
            if delta.finish_reason is not None:
                return
            if self.aborted:
                await stream.aclose()
        if not self.silent:
            self.push(self._response(index, merge(waiting or [Delta(())]), "cancelled"))

    def _check_first(self, delta: Delta, index: int) -> None:
        first = self.disaggregated.first_gen_tokens if self.kind == "generation_only" else None
        if first and delta.token_ids[:1] != (first[index],):
            raise RequestError(
                f"first_gen_tokens[{index}] is {first[index]}, but these parameters lead to {delta.token_ids[:1]}"
            )

    def _response(self, index: int, delta: Delta, finish: str | None = None) -> Response:
        params = self.result.sampling_params
        response = Response(index, delta.token_ids, finish_reason=finish or delta.finish_reason)
        named = set(stop_ids(params)) - (set() if params.ignore_eos else {params.end_id})
        if delta.finish_reason == "stop" and (last := delta.token_ids[-1]) in named:
            response.stop_reason, response.trimmed = last, not params.include_stop_str_in_output
        if params.logprobs or (NEWEST and params.logprobs == 0):
            response.logprobs = self._scores(index, delta)
            response.cumulative_logprob = sum(token[0].logprob for token in delta.logprobs)
        if delta.prompt is not None:
            response.cached_tokens, response.queue_seconds = delta.prompt.cached_tokens, delta.prompt.queue_seconds
            response.prompt_logprobs = self._prompt_scores(delta.prompt.logprobs or ())
        response.times = self._transfer()
        response.drafts = self._drafts(len(delta.token_ids))
        if self.kind == "context_only":
            response.finish_reason = (
                faults.context_finish_reason if response.finish_reason == "length" else response.finish_reason
            )
            response.disaggregated_params = self._context_params(delta.token_ids)
            if NEWEST:
                self._place(response.disaggregated_params, response.logprobs)
        return response

    def _transfer(self) -> dict[str, float]:
        """When a generation worker had fetched the prompt's KV blocks: before the first response."""
        if self.kind != "generation_only":
            return {}
        size = KV_BYTES * len(self.result.prompt_token_ids)
        return {"transfer_start": self.started, "transfer_end": self.begun_at, "transfer_bytes": size}

    def _drafts(self, tokens: int) -> tuple[int, int]:
        """Speculation drafts `max_draft_len` tokens for each new one; none of them is ever accepted here."""
        speculative = self.result._executor.args.speculative_config
        self.steps += tokens if speculative is not None else 0
        return self.steps * (getattr(speculative, "max_draft_len", None) or 1), 0

    def _prompt_scores(self, tokens: Sequence[TokenLogprobs | None]) -> list[dict[int, Any]]:
        """Entry i is of the logits at position i, which are about token i + 1. Cached positions have no logits.

        1.2.1 has the most likely tokens alone, main the prompt's own token too.
        """
        cached = self.result._executor.reuse(self.cache_salt, self.result.prompt_token_ids)
        entries = [_entry(token if NEWEST else token[1:]) for token in tokens[1:] if token is not None]
        return entries[cached:]

    def _scores(self, index: int, delta: Delta) -> list[dict[int, Any]]:
        """Log-probabilities of new tokens. 1.2.1's generation worker has none for the context worker's token, main's
        those that came with it (#11727).
        """
        alone = self.sampler.name == "TRTLLMSampler"  # which reports the sampled token's alone
        entries = [_entry(token[:1] if alone else token) for token in delta.logprobs]
        if self.kind != "generation_only" or index in self.scored:
            return entries
        self.scored.add(index)
        given = (self.disaggregated.first_gen_log_probs or []) if NEWEST else []
        for entry in given:
            assert all(isinstance(value, Logprob) for value in entry.values()), "append_log_probs reads .logprob"
        return [*given, *entries[1:]]

    def _place(self, params: Any, logprobs: list[dict[int, Any]]) -> None:
        """Write what main adds: log-probabilities, and where the blocks are."""
        params.first_gen_log_probs = logprobs or None
        params.ctx_dp_rank, params.ctx_info_endpoint = 0, "tcp://127.0.0.1:1"

    def _context_params(self, token_ids: tuple[int, ...]) -> Any:
        """The request's own params with what a generation worker needs."""
        params = self.result.disaggregated_params or copy.copy(self.disaggregated)
        params.first_gen_tokens = [*(params.first_gen_tokens or ()), *token_ids]
        params.ctx_request_id = self.id
        params.multimodal_embedding_handles = None
        params.draft_tokens = self._draft(token_ids)
        request_id = params.disagg_request_id if NEWEST else None
        state = State(self.result.prompt_token_ids, self.fields["seed"], params.draft_tokens, self.images, request_id)
        params.opaque_state = msgspec.json.encode(state)
        return params

    def _draft(self, token_ids: tuple[int, ...]) -> list[int] | None:
        """What a speculating context worker guesses that comes next: the same again."""
        speculative = self.result._executor.args.speculative_config
        return None if speculative is None else [*token_ids] * (speculative.max_draft_len or 1)


class State(msgspec.Struct, frozen=True):
    """What a context worker leaves for generation."""

    prompt: list[int]
    seed: int | None
    draft: list[int] | None
    images: tuple[MediaSpan, ...]
    request_id: int | None = None
    """Main's transceiver finds the blocks by it."""


def restore(params: Any, prompt: list[int]) -> tuple[int | None, tuple[MediaSpan, ...]]:
    """Return seed and images of the context request.

    Raises RequestError if `params` are not of a context request for this prompt.
    """
    if params.ctx_request_id is None or not isinstance(params.opaque_state, bytes):
        raise RequestError("a generation_only request needs ctx_request_id and opaque_state")
    try:
        state = msgspec.json.decode(params.opaque_state, type=State)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(_LOST) from error
    if state.prompt != prompt:
        raise RequestError(_LOST)
    if state.draft != params.draft_tokens:
        raise RequestError(_LOST)
    if NEWEST and (params.disagg_request_id, params.ctx_info_endpoint) != (state.request_id, "tcp://127.0.0.1:1"):
        raise RequestError(_LOST)
    return state.seed, state.images


def _entry(token: TokenLogprobs) -> dict[int, Any]:
    return {item.token_id: Logprob(item.logprob, item.rank) for item in reversed(token)}
