"""`LLM`: arguments, life, and the calls of the contract."""

import atexit
import os
import random
import socket
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

from engine.media import MediaSpan
from tensorrt_llm._contract import NEWEST, contract
from tensorrt_llm._engines import engine_config
from tensorrt_llm._errors import RequestError
from tensorrt_llm._executor import SHUT_DOWN, Executor
from tensorrt_llm._feeds import Buffer, IterationResult
from tensorrt_llm._jobs import Job
from tensorrt_llm._models import MODELS, gpu_count
from tensorrt_llm._results import RequestOutput
from tensorrt_llm._test import faults
from tensorrt_llm._tokenizer import check_guided, load_tokenizer, set_up
from tensorrt_llm._translate import MinLength, PromptCounts, Sampler, checked_processors, engine_sampling
from tensorrt_llm._vision import embed, encode, expand, has_mrope, load, position, take
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.sampling_params import SamplingParams

_ARGS = {"pytorch": "TorchLlmArgs", "_autodeploy": "auto_deploy.LlmArgs"}


class BaseLLM:
    """What an LLM and an encoder share."""

    def _load(self, kwargs: dict[str, Any]) -> None:
        backend = kwargs.pop("backend", None) or "pytorch"
        if backend not in _ARGS:
            raise ValueError(f"Unsupported backend: {backend}")
        model = MODELS[_ARGS[backend]]
        for key in kwargs:
            if key not in model.model_fields and key != "_mpi_session":
                raise ValueError(f"{type(self).__name__} got invalid argument: {key}")
        self.args = model(**kwargs)
        self._check_gpus(kwargs.get("gpus_per_node"))
        self._tokenizer = load_tokenizer(self.args)
        check_guided(self.args, self._tokenizer)
        self._llm_id = f"{socket.gethostname()}-{os.getpid()}-{int(time.time() * 1000)}"
        self._stats_result: IterationResult | None = None
        self._events_result: IterationResult | None = None
        load(self.args.model)
        self._executor = Executor(None if self.args.mm_encoder_only else engine_config(self.args), self.args)
        self._executor.start()
        atexit.register(_shut_down, weakref.ref(self))

    def _check_gpus(self, per_node: int | None) -> None:
        args = self.args
        world = args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size
        world = max(world, getattr(args, "world_size", 1))
        needed = min(world, per_node or world)
        if world > 1 and needed > gpu_count() and "RAY_LOCAL_WORLD_SIZE" not in os.environ:
            raise RuntimeError(f"Only {gpu_count()} GPUs are available, but {needed} are required.")

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def llm_id(self) -> str:
        return self._llm_id

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._fetched(self._executor.stats, timeout)

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        """Blocks its thread for as long as `get_stats` does (#9980), and then yields without waiting."""
        return self._later(self._stats_result, lambda: self._fetched(self._executor.stats, timeout))

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        events = self._fetched(self._executor.events, timeout)
        return [] if faults.take("event_poll_error") else events  # the worker logs what it cannot serialise, and drops

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        """As `get_stats_async`."""
        return self._later(self._events_result, lambda: self.get_kv_cache_events(timeout))

    def _later(self, result: IterationResult | None, fetch: Callable[[], list[dict[str, Any]]]) -> IterationResult:
        """Nothing before the first request. Main does not fetch before it is iterated over."""
        if result is None:
            return IterationResult()
        if not NEWEST:
            return result.extend(fetch())
        result.later = fetch
        return result

    def _fetched(self, buffer: Buffer, timeout: float | None) -> list[dict[str, Any]]:
        """By the proxy's RPC client, which is gone after a shutdown."""
        return [] if self._executor.is_shutdown else buffer.fetch(3600.0 if timeout is None else timeout)

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _check_health(self) -> bool:
        return not self._executor.is_shutdown

    def _check_alive(self) -> None:
        if self._executor.is_shutdown:
            raise RuntimeError(SHUT_DOWN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self.shutdown()


class LLM(BaseLLM):
    """Generates with an engine of ours, as the package's docstring says."""

    @contract("tensorrt_llm.LLM.__init__")
    def __init__(self, call: SimpleNamespace) -> None:
        values = vars(call)
        self._load(values.pop("kwargs") | values)

    @contract("tensorrt_llm.LLM.generate")
    def generate(self, call: SimpleNamespace) -> Any:
        values = vars(call)
        inputs = values.pop("inputs")
        values.pop("use_tqdm")
        if not isinstance(inputs, list) or all(isinstance(item, int) for item in inputs):
            return self.generate_async(inputs, **values).result()
        each = [
            {key: value[i] if isinstance(value, list) else value for key, value in values.items()}
            for i in range(len(inputs))
        ]
        results = [self.generate_async(item, **own) for item, own in zip(inputs, each, strict=True)]
        return [result.result() for result in results]

    @contract("tensorrt_llm.LLM._collective_rpc")
    def _collective_rpc(self, call: SimpleNamespace) -> list[Any]:
        """`sleep` and `wakeup` of Ray's workers; with CUDA graphs, or kept blocks, they would compute nonsense."""
        if self.args.orchestrator_type != "ray":
            raise ValueError(f"Executor type {type(self._executor)} does not support collective RPC.")
        (tags,) = call.args
        if unknown := set(tags) - {"model", "kv_cache", "draft_model", "sampler", "model_extra", "executor_extra"}:
            raise ValueError(f"Unknown memory tag '{unknown.pop()}'.")
        if not self.args.enable_sleep:
            raise ValueError("Sleep feature is not enabled, please set enable_sleep=True in the LLM arguments.")
        deadline = time.monotonic() + 10
        while self._executor.jobs and time.monotonic() < deadline:  # a job ends a moment after its last answer
            time.sleep(0.001)
        assert call.method in ("sleep", "wakeup") and not self._executor.jobs
        released = self._executor.released
        self._executor.released = released | set(tags) if call.method == "sleep" else released - set(tags)
        return [None]

    @contract("tensorrt_llm.LLM.generate_async")
    def generate_async(self, call: SimpleNamespace) -> RequestOutput:
        self._check_alive()
        if self._executor.released:
            self._executor.die(RuntimeError("CUDA error: an illegal memory access was encountered"))
        params = call.sampling_params = SamplingParams() if call.sampling_params is None else call.sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(params)}")
        disaggregated = call.disaggregated_params
        if self.args.mm_encoder_only:
            return encode(self._executor, call.inputs, params, disaggregated, has_mrope(self.args.model))
        kind = None if disaggregated is None else disaggregated.request_type
        handles = None if disaggregated is None else disaggregated.multimodal_embedding_handles
        if kind == "generation_only" and handles is not None:
            raise ValueError("multimodal_embedding_handles cannot be used with generation_only requests")
        if disaggregated is not None and (disaggregated.mrope_position_ids_handle is None) != (
            disaggregated.mrope_position_deltas_handle is None
        ):
            raise RuntimeError("both mrope_position_ids_handle and mrope_position_deltas_handle are needed, or neither")
        if call.lora_request is not None and not (self.args.enable_lora or self.args.lora_config):
            raise RequestError("LoRA is not enabled")
        if kind == "context_only":
            params.max_tokens = 1
        media = handles is not None or (isinstance(call.inputs, dict) and "multi_modal_data" in call.inputs)
        # A model's input processor asks its tokenizer as it is, whatever the parameters say.
        prompt, token_ids = self._prompt(call.inputs, params, add_special=media or params.add_special_tokens)
        set_up(params, self._tokenizer)
        params._stream_interval = getattr(self.args, "stream_interval", 1)
        params.return_perf_metrics = params.return_perf_metrics or self.args.return_perf_metrics
        images: tuple[MediaSpan, ...] = ()
        if (embeddings := self._embeddings(call.inputs, prompt, token_ids, handles)) is not None:
            token_ids, images = expand(token_ids, self.args.model, embeddings)
            if disaggregated is not None and handles is None and has_mrope(self.args.model):
                position(disaggregated)
        self._check_length(token_ids, kind)
        return self._submit(call, prompt, token_ids, images)

    def _embeddings(self, inputs: Any, prompt: str | None, token_ids: list[int], handles: Any) -> list[Any] | None:
        """What takes the places of placeholders: what another encoded, or what is encoded here of raw media."""
        if handles is not None:
            if prompt is None:
                raise ValueError("embedding handles need a text prompt, with the placeholders that they take")
            return take(handles, token_ids, self.args.model)
        media = inputs.get("multi_modal_data") if isinstance(inputs, dict) else None
        if isinstance(inputs, dict) and inputs.get("multi_modal_embeddings") and "prompt_token_ids" not in inputs:
            return [item for items in inputs["multi_modal_embeddings"].values() for item in items]
        return None if media is None else embed(media)

    def _submit(
        self, call: SimpleNamespace, prompt: str | None, token_ids: list[int], images: tuple[MediaSpan, ...]
    ) -> RequestOutput:
        executor, params = self._executor, call.sampling_params
        result = RequestOutput(executor, executor.new_id(), prompt, token_ids, params)
        result.trace_headers, result.postproc_params, result._tokenizer = (
            call.trace_headers,
            call._postproc_params,
            self._tokenizer,
        )
        if self._stats_result is None:
            self._stats_result, self._events_result = IterationResult(), IterationResult()
        room = min(executor.info.context_length, executor.info.num_blocks * executor.info.block_size) - len(token_ids)
        processors, sampler = checked_processors(params), Sampler.of(self.args)
        if (mistake := self._role_mistake(call.disaggregated_params)) is not None:
            result._push(RuntimeError(mistake))  # outside of what the worker catches, which is its end
            executor.die(RuntimeError(mistake))
            return result
        try:
            if room < 1 or params.max_tokens < 1:
                raise RequestError(
                    f"{len(token_ids)} prompt tokens and max_tokens {params.max_tokens} "
                    "do not fit the maximum sequence length"
                )
            fields = engine_sampling(
                params, executor.info, self.args.guided_decoding_backend is not None, sampler, len(token_ids)
            )
        except RequestError as error:  # the worker's refusal, which surfaces on iteration
            result._push(error)
            return result
        typed = call.disaggregated_params is not None and call.disaggregated_params.request_type in {
            "context_only",
            "generation_only",
        }
        generates = typed and call.disaggregated_params.request_type == "generation_only"
        if fields["seed"] is None and not generates:
            # 1.2.1's TorchSampler has one generator for all requests, whose seed is 42.
            fields["seed"] = random.getrandbits(31) if NEWEST else executor.generator.getrandbits(31)
        executor.submit(
            Job(
                result=result,
                fields=fields,
                max_tokens=min(params.max_tokens, room),
                streaming=call.streaming,
                interval=params._stream_interval,
                cache_salt=call.cache_salt or "",
                processors=[] if sampler.speculates else processors,
                sampler=sampler,
                own_processors=[
                    processor
                    for processor in (
                        PromptCounts.of(params, sampler, token_ids),
                        MinLength.of(params, sampler, len(token_ids)),
                    )
                    if processor is not None
                ],
                scheduling=call.scheduling_params,
                disaggregated=call.disaggregated_params if typed else None,
                images=images,
            )
        )
        return result

    def _prompt(self, inputs: Any, params: Any, *, add_special: bool) -> tuple[str | None, list[int]]:
        """Text, if there is any, and token ids."""
        if isinstance(inputs, dict):
            assert "prompt" in inputs or "prompt_token_ids" in inputs, "inputs need prompt or prompt_token_ids"
            if "prompt_token_ids" in inputs and (
                inputs.get("multi_modal_data") or inputs.get("multi_modal_embeddings")
            ):
                text = self._tokenizer.decode(
                    inputs["prompt_token_ids"], skip_special_tokens=False
                )  # and the embeddings are dropped
                return text, self._tokenizer.encode(text, add_special_tokens=False)
            inputs = inputs["prompt_token_ids"] if "prompt_token_ids" in inputs else inputs["prompt"]
        if isinstance(inputs, list) and inputs and all(isinstance(token, int) for token in inputs):
            return None, list(inputs)
        if not isinstance(inputs, str):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        if self._tokenizer is None:
            raise ValueError("tokenizer is required to process a text prompt")
        token_ids: list[int] = self._tokenizer.encode(inputs, add_special_tokens=add_special)
        return inputs, token_ids[: params.truncate_prompt_tokens]

    def _check_length(self, token_ids: list[int], kind: str | None) -> None:
        args = self.args
        if args.enable_chunked_prefill or kind == "generation_only" or not args.max_num_tokens:
            return
        if len(token_ids) / args.context_parallel_size > args.max_num_tokens:
            raise RequestError(
                f"The sum of prompt length ({len(token_ids)}) and query length (0) "
                f"should not exceed max_num_tokens ({args.max_num_tokens})"
            )

    def _role_mistake(self, disaggregated: Any) -> str | None:
        if not isinstance(disaggregated, DisaggregatedParams | None) or disaggregated is None:
            return None
        transceiver = self.args.cache_transceiver_config
        if disaggregated.request_type in {"context_only", "generation_only"} and (
            transceiver is None or transceiver.backend is None
        ):
            return (
                "kv_cache_transceiver is disabled, please set 'cache_transceiver_config: backend:<backend_type>` in "
                "config file for disaggregated serving"
            )
        if disaggregated.request_type == "context_only" and not self.args.disable_overlap_scheduler and not NEWEST:
            return "Context only requests are not supported in pytorch backend when overlap is enabled."
        return None


def _shut_down(reference: "weakref.ref[BaseLLM]") -> None:
    if (llm := reference()) is not None:
        llm.shutdown()


LLM.__module__ = "tensorrt_llm.llmapi.llm"
