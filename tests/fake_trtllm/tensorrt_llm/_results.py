"""The result of a request: one object, mutated with each response that its consumer takes."""

import asyncio
import contextlib
import queue
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Self

from tensorrt_llm import _test
from tensorrt_llm._contract import NEWEST
from tensorrt_llm._metrics import metrics_dict, perf_metrics
from tensorrt_llm._outputs import CompletionOutput
from tensorrt_llm.metrics import MetricNames

_NO_LOOP = "The asyncio event loop was not present during initialization, so async operations are not available."


@dataclass
class Response:
    """What the executor says of one sequence: new tokens, and how it ended if it did."""

    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: list[dict[int, Any]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Any]] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    trimmed: bool = False
    """Whether the last token is a stop token that is not to be shown."""
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    """Moments of a KV transfer, and its bytes."""
    drafts: tuple[int, int] = (0, 0)
    """Draft tokens so far, and those of them that were accepted."""
    disaggregated_params: Any = None
    mm_embedding_handle: dict[str, Any] | None = None
    encoded: Any = None
    """The parameters that an encoder adds to the result, and to no output."""


class GenerationResult:
    """Awaitable, and iterable both ways: each step takes one response and yields this same object."""

    def __init__(self, executor: Any, request_id: int, prompt_token_ids: list[int], sampling_params: Any) -> None:
        self.request_id = self.id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = sampling_params
        self.outputs = [CompletionOutput(index) for index in range(sampling_params.n)]
        self.context_logits = self.mm_embedding_handle = self.avg_decoded_tokens_per_iter = self.postproc_params = None
        self.disaggregated_params: Any = None
        self.trace_headers: Any = None
        self.decoding_iter = self.cached_tokens = 0
        self.metrics_dict: dict[Any, Any] = {}
        self.use_trtllm_sampler = False
        self._times: dict[str, float] = {"arrival": time.monotonic()}
        self._executor = executor
        self._done = self._aborted = False
        self._tokenizer: Any = None
        self._queue: queue.SimpleQueue[Response | Exception] = queue.SimpleQueue()
        self.aqueue: asyncio.Queue[Response | Exception] | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
            self.aqueue = asyncio.Queue()

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        """Ask for the end of the request, which goes on until a response says 'cancelled'."""
        self._aborted = True
        self._executor.abort(self.request_id)

    def aborted(self) -> bool:
        return self._aborted

    def result(self, timeout: float | None = None) -> Self:
        """Block until the end. The timeout is ignored, as it is in 1.2.1."""
        while not self._done:
            self._handle(self._queue.get())
        return self

    async def aresult(self) -> Self:
        while not self._done:
            await self._step()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.aresult().__await__()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        if self._done:
            raise StopIteration
        self._handle(self._queue.get())
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self._done:
            raise StopAsyncIteration
        await self._step()
        return self

    def _push(self, response: Response | Exception) -> None:
        """Deliver, from any thread. Each consumer reads one of the two queues."""
        if self.aqueue is None:
            self._queue.put(response)
            return
        self._queue.put(response)
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self.aqueue.put_nowait, response)

    async def _step(self) -> None:
        assert self.aqueue is not None, _NO_LOOP
        self._handle(await self.aqueue.get())

    def _handle(self, response: Response | Exception) -> None:
        if isinstance(response, Exception):
            raise response
        output = self.outputs[response.index]
        output._last_token_ids_len = len(output.token_ids)
        output._last_logprobs_len = len(output.logprobs)
        output._last_text_len = len(output.text)
        output.token_ids.extend(response.token_ids[:-1] if response.trimmed else response.token_ids)
        output.logprobs.extend(response.logprobs)
        scored = self.sampling_params.logprobs or (NEWEST and self.sampling_params.logprobs == 0)
        if scored and response.finish_reason != "cancelled":
            assert len(output.logprobs) == output.length + response.trimmed
        if response.cumulative_logprob is not None:
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + response.cumulative_logprob
        if response.prompt_logprobs:
            output.prompt_logprobs = response.prompt_logprobs
        output.finish_reason, output.stop_reason = response.finish_reason, response.stop_reason
        self._describe(output, response)
        if self._tokenizer is not None and self.sampling_params.detokenize:
            self._detokenize(output)
        self._done = all(output.finish_reason is not None for output in self.outputs)
        if self._done:
            if self.sampling_params.return_perf_metrics:
                self.metrics_dict = metrics_dict(self._times, output)
            self._trace(output)

    def _describe(self, output: Any, response: Response) -> None:
        """What the response says besides tokens."""
        self.decoding_iter += 1
        self.cached_tokens = max(self.cached_tokens, response.cached_tokens)
        if response.token_ids:
            self._times.setdefault("first_token", time.monotonic())
            self._times.setdefault("scheduled", self._times["arrival"] + response.queue_seconds)
        self._times["last_token"] = time.monotonic()
        if response.disaggregated_params is not None:
            self.disaggregated_params = output.disaggregated_params = response.disaggregated_params
        if response.mm_embedding_handle is not None:
            self.mm_embedding_handle = response.mm_embedding_handle  # type: ignore[assignment]
            self.disaggregated_params = response.encoded
        if self.sampling_params.return_perf_metrics:  # in every response
            self._times.update(response.times)
            output.request_perf_metrics = perf_metrics(
                self._times, self.decoding_iter, self.cached_tokens, response.drafts
            )

    def _trace(self, output: Any) -> None:
        """`do_tracing`: a span if there is a collector, a warning and no span if there are no metrics."""
        if not self._executor.args.otlp_traces_endpoint:
            return
        if not self.metrics_dict:
            _test.untraced += 1
            return
        attributes = {
            "gen_ai.latency.e2e": self.metrics_dict.get(MetricNames.E2E, 0.0),
            "gen_ai.usage.completion_tokens": output.length,
        }
        _test.spans.append({"name": "llm_request", "context": dict(self.trace_headers or {}), **attributes})

    def _detokenize(self, output: Any) -> None:
        """The text so far, cut where a stop string begins: that ends the request, and its tokens stay as they are."""
        params = self.sampling_params
        output.text = self._tokenizer.decode(output.token_ids, skip_special_tokens=params.skip_special_tokens)
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
        for stop in stops:
            if (at := output.text.find(stop)) >= 0:
                output.text = output.text[: at + len(stop) if params.include_stop_str_in_output else at]
                output.finish_reason, output.stop_reason = "stop", stop
                self.abort()
                return


GenerationResult.__module__ = "tensorrt_llm.executor.result"


class RequestOutput(GenerationResult):
    """What `LLM.generate_async` returns."""

    def __init__(
        self, executor: Any, request_id: int, prompt: str | None, prompt_token_ids: list[int], sampling_params: Any
    ) -> None:
        super().__init__(executor, request_id, prompt_token_ids, sampling_params)
        self.prompt = prompt


RequestOutput.__module__ = "tensorrt_llm.llmapi.llm"
