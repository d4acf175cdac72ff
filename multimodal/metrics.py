"""Metrics of generations, under TensorRT-LLM's names where it has one."""

import time
from collections.abc import Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.media import kinds_of
from engine.types import GenerateRequest, Performance

Api = Literal["chat_completions", "completions", "responses", "messages"]
"""The generating APIs, as labels of metrics."""

# Bounds of buckets: vLLM's, so that rules made for it find theirs, and more where it has gaps; up to the timeout of
# requests.
_FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 60.0, 80.0, 120.0, 160.0, 300.0, 600.0),
)
_BETWEEN_TOKENS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 480.0, 600.0),
)
_BYTES = tuple(1 << power for power in range(12, 37, 2))
_SHARES = (*(tenth / 10 for tenth in range(1, 10)), 1.0)
_TOKENS = (1, 2, 5, *(base * 10**power for power in range(1, 6) for base in (1, 2, 5)))


class GenerationMetrics:
    """Prometheus metrics of one model; a `ChoiceTimer` follows one choice. `parsers` are the names of those of tool
    calls and of reasoning; empty for none.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, parsers: tuple[str, str] = ("", "")) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"trtllm_{name}", text, ["model_name"], registry=registry, buckets=buckets).labels(
                model_name
            )

        def counter(name: str, text: str) -> Counter:
            return Counter(f"trtllm_{name}", text, ["model_name"], registry=registry).labels(model_name)

        def parsed(name: str, text: str, parser: str) -> dict[Api, Counter]:
            family = Counter(f"trtllm_{name}", text, ["model_name", "parser", "api"], registry=registry)
            return {api: family.labels(model_name, parser or "none", api) for api in get_args(Api)}

        def seconds(name: str, text: str, buckets: Sequence[float] = _REQUEST) -> Histogram:
            return histogram(f"{name}_seconds", f"Seconds {text}", buckets)

        self.first_token = seconds("time_to_first_token", "from a request's arrival to its first token", _FIRST_TOKEN)
        self.inter_token = seconds("inter_token_latency", "between a token and the next", _BETWEEN_TOKENS)
        self.per_token = seconds("time_per_output_token", "between the tokens of a choice, their mean", _BETWEEN_TOKENS)
        self.end_to_end = seconds("e2e_request_latency", "from a request's arrival to its last token")
        self.queue = seconds("request_queue_time", "from a request's arrival until the engine began with it")
        self.prefill = seconds("request_prefill_time", "from the engine's beginning to the first token")
        self.decode = seconds("request_decode_time", "from the first token to the last")
        self.inference = seconds("request_inference_time", "from the engine's beginning to the last token")
        self.engine_first_token = seconds(
            "engine_time_to_first_token", "from the engine's receipt of a request to its first token", _FIRST_TOKEN
        )
        self.engine_per_token = seconds(
            "engine_time_per_output_token", "between the tokens of a choice in the engine, their mean", _BETWEEN_TOKENS
        )
        self.engine_end_to_end = seconds(
            "engine_e2e_request_latency", "from the engine's receipt of a request to its last token"
        )
        self.transfer = seconds("request_kv_transfer", "that reading the KV blocks of a prompt took")
        self.transfer_bytes = histogram("request_kv_transfer_bytes", "Bytes of the KV blocks read for a prompt", _BYTES)
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens that speculation drafted")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Drafted tokens that the model accepted")
        self.acceptance = histogram(
            "request_spec_decode_acceptance_rate", "Share of a choice's drafted tokens that were accepted", _SHARES
        )
        self.prompt_length = histogram("request_prompt_tokens", "Tokens in the prompt of a choice", _TOKENS)
        self.output_length = histogram(
            "request_generation_tokens", "Tokens generated for a choice that finished", _TOKENS
        )
        self.image_requests = counter("request_type_image", "Requests with images or videos")
        self.audio_requests = counter("request_type_audio", "Requests with audio")
        self.speech_seconds = counter("transcribed_audio_seconds", "Seconds of audio in finished transcripts")
        self.structured_requests = counter(
            "request_type_structured_output", "Requests whose output has to follow a grammar"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens in prompts")
        self.cached_tokens = counter("prompt_cached_tokens", "Prompt tokens whose KV blocks were reused")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.errors = counter("request_error", "Choices that ended with an error")
        self.aborted = counter("num_aborted_requests", "Choices whose client went away")
        success = Counter(
            "trtllm_request_success", "Choices that finished", ["model_name", "finished_reason"], registry=registry
        )
        self.tool_calls = parsed("tool_calls", "Tool calls in answers", parsers[0])
        self.malformed_calls = parsed("malformed_tool_calls", "Tool calls that began and never completed", parsers[0])
        self.reasoning_tokens = parsed("reasoning_tokens", "Tokens of reasoning", parsers[1])
        self.finished = {reason: success.labels(model_name, reason) for reason in ("stop", "length")}

    def requested(self, request: GenerateRequest) -> None:
        """Count a request; all its choices are like `request`."""
        if request.media is not None:
            kinds = kinds_of(request.media)
            self.image_requests.inc(bool(kinds - {"audio"}))
            self.audio_requests.inc("audio" in kinds)
        if request.sampling.guide is not None:
            self.structured_requests.inc()

    def parsed(self, api: Api, calls: int, malformed: int, reasoning: int) -> None:
        """Count the tool calls and reasoning that a parser found in a finished choice."""
        self.tool_calls[api].inc(calls)
        self.malformed_calls[api].inc(malformed)
        self.reasoning_tokens[api].inc(reasoning)


class ChoiceTimer:
    """The clock of one choice, until `finish`, `fail`, or `stop` alone if its client went away."""

    __slots__ = ("_begun", "_count", "_ended", "_first", "_last", "_metrics", "_start")

    def __init__(self, metrics: GenerationMetrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._begun = self._start
        self._first = 0.0
        self._last = 0.0
        self._count = 0
        self._ended = False

    def prompt(self, tokens: int, cached: int, queue_seconds: float) -> None:
        """Note the engine's report on the prompt, which comes with the first token."""
        self._begun = self._start + queue_seconds
        self._metrics.queue.observe(queue_seconds)
        self._metrics.prompt_tokens.inc(tokens)
        self._metrics.prompt_length.observe(tokens)
        self._metrics.cached_tokens.inc(cached)

    def tokens(self, count: int) -> None:
        """Note that `count` tokens have arrived."""
        now = time.perf_counter()
        if not self._last:
            self._metrics.first_token.observe(now - self._start)
            self._metrics.prefill.observe(now - self._begun)
            self._first = now
        elif count:
            self._metrics.inter_token.observe((now - self._last) / count)
        self._last = now
        self._count += count
        self._metrics.generation_tokens.inc(count)

    def measured(self, performance: Performance) -> None:
        """Note the engine's measurements, which come with the last delta."""
        metrics = self._metrics
        for histogram, value in (
            (metrics.engine_first_token, performance.first_token_seconds),
            (metrics.engine_per_token, performance.token_seconds),
            (metrics.engine_end_to_end, performance.seconds),
            (metrics.transfer, performance.transfer_seconds),
            (metrics.transfer_bytes, performance.transfer_bytes),
        ):
            if value:
                histogram.observe(value)
        if performance.draft_tokens:
            metrics.draft_tokens.inc(performance.draft_tokens)
            metrics.accepted_tokens.inc(performance.accepted_tokens)
            metrics.acceptance.observe(performance.accepted_tokens / performance.draft_tokens)

    def finish(self, reason: str) -> None:
        """Note that the choice has finished."""
        self._metrics.end_to_end.observe(time.perf_counter() - self._start)
        self._metrics.decode.observe(self._last - self._first)
        self._metrics.inference.observe(self._last - self._begun)
        if self._count > 1:
            self._metrics.per_token.observe((self._last - self._first) / (self._count - 1))
        self._metrics.output_length.observe(self._count)
        self._metrics.finished[reason].inc()
        self._ended = True

    def fail(self) -> None:
        """Note that the choice has failed."""
        self._metrics.errors.inc()
        self._ended = True

    def stop(self) -> None:
        """Stop the clock; a choice that has neither finished nor failed was aborted."""
        if not self._ended:
            self._metrics.aborted.inc()
