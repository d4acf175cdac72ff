"""All calls into `tensorrt_llm`, imported on first use. A test checks every name and keyword against its API."""

import copy
import logging
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any

from msgspec.structs import replace

from engine.checkpoints.facts import ModelFacts
from engine.config import Tag, TrtllmConfig, TrtllmEncoderConfig
from engine.errors import EngineDied, EngineError, EngineFailure, InvalidRequest
from engine.kit.image_file import limit_pixels
from engine.kit.logits import factory
from engine.media import Encoding, MediaFiles, Unexpanded
from engine.trtllm.disaggregation import context_keywords, generation_keywords, local_keywords
from engine.trtllm.failures import classified, is_a_refusal, is_of_the_engine
from engine.trtllm.media import Frames
from engine.trtllm.sampling import bias_of, guide_keywords, sampling_keywords
from engine.trtllm.support import Edits
from engine.trtllm.versions import PackageVersion, version_of
from engine.types import GenerateRequest, SamplingParams

_MEMORY: dict[Tag, str] = {"weights": "model", "kv_cache": "kv_cache"}
"""Names of memory in 1.2.1 (`ExecutorMemoryType`)."""
_OF_THE_REQUEST = (AssertionError, NotImplementedError, TypeError, ValueError)
"""Errors with which 1.2.1 rejects a request before it is sent to a worker. A RuntimeError may be anything."""

log = logging.getLogger(__name__)


def load(config: TrtllmConfig) -> Any:
    """Load the `LLM`, or the `MultimodalEncoder` of an encode replica, which may take minutes. Raises EngineFailure."""
    arguments = copy.deepcopy(config.arguments)  # the library changes some of its arguments
    try:
        from tensorrt_llm import LLM  # noqa: PLC0415 - takes seconds, and exists on GPU machines only
        from tensorrt_llm.llmapi import MultimodalEncoder  # noqa: PLC0415
        from tensorrt_llm.llmapi.llm_args import update_llm_args_with_extra_dict  # noqa: PLC0415
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "tensorrt_llm"
        raise EngineFailure(
            f"tensorrt_llm cannot be imported ({error}): run in NVIDIA's container, or see docs/tensorrt-llm.md"
        ) from (None if absent else error)
    limit_pixels(config.max_image_pixels)
    try:
        if isinstance(config, TrtllmEncoderConfig):
            return MultimodalEncoder(**{**arguments, "model": config.model})
        # Nulls bypass this function, which would fail to make nested configurations of them.
        classes = update_llm_args_with_extra_dict(
            {}, {name: value for name, value in arguments.items() if value is not None}
        )
        if config.backend == "_autodeploy":
            # The class that upstream serves with: its factory finds the checkpoint and makes the tokenizer.
            from tensorrt_llm._torch.auto_deploy import LLM as AutoDeployLLM  # noqa: N811, PLC0415

            return AutoDeployLLM(**{**arguments, **classes, "model": config.model})
        return LLM(**{**arguments, **classes, "model": config.model, "backend": config.backend})
    except Exception as error:
        raise EngineFailure(f"TensorRT-LLM cannot load {config.model}: {error}") from error


def installed() -> PackageVersion:
    """Return the facts of the package, once it is loaded."""
    from tensorrt_llm import __version__  # noqa: PLC0415

    return version_of(__version__)


def shutdown(llm: Any) -> None:
    """Shut down; errors are only logged."""
    try:
        llm.shutdown()
    except Exception as error:
        log.warning("TensorRT-LLM did not shut down cleanly: %s", error)


def sleep_obstacle(config: TrtllmConfig, level: int) -> str:
    """Return why 1.2.1 cannot release memory at a level, or cannot as it is started; empty if it can."""
    if level > 1:
        return "TensorRT-LLM keeps the weights in memory of the host: it sleeps at level 1 alone."
    arguments = config.arguments
    needed = {
        "orchestrator_type: ray": arguments.get("orchestrator_type") == "ray",  # others have no _collective_rpc
        "enable_sleep: true": bool(arguments.get("enable_sleep")),
        "cuda_graph_config: null": arguments.get("cuda_graph_config", {}) is None,
        # Its contents are dropped, and its keys stay.
        "kv_cache_config.enable_block_reuse: false": (arguments.get("kv_cache_config") or {}).get("enable_block_reuse")
        is False,
    }
    if config.backend != "pytorch":
        return f"TensorRT-LLM releases memory with the backend pytorch alone, not with {config.backend}."
    lacks = ", ".join(argument for argument, given in needed.items() if not given)
    return f"TensorRT-LLM releases memory only with these arguments (EXTRA_ENGINE_ARGS): {lacks}." if lacks else ""


def release_memory(llm: Any, tags: Collection[Tag]) -> None:
    """Release memory, the weights to the host; waits for all workers. Raises EngineFailure."""
    _move_memory(llm, "sleep", tags)


def resume_memory(llm: Any, tags: Collection[Tag]) -> None:
    """Take released memory again; waits for all workers. Raises EngineFailure."""
    _move_memory(llm, "wakeup", tags)


def _move_memory(llm: Any, method: str, tags: Collection[Tag]) -> None:
    try:
        llm._collective_rpc(method, ([_MEMORY[tag] for tag in tags],))
    except Exception as error:
        raise EngineFailure(f"TensorRT-LLM's {method} failed: {type(error).__name__}: {error}") from error


def is_alive(llm: Any) -> bool:
    """Return whether the executor runs. It shuts itself down after errors that concern more than one request."""
    try:
        return bool(llm._check_health())
    except Exception as error:
        log.error("TensorRT-LLM's health check failed: %s: %s", type(error).__name__, error)
        return False


def start_text(llm: Any) -> str:
    """Return the text of the token that the tokenizer puts before every prompt; empty if it is none, or not alone."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return ""
    added = tokenizer.encode("", add_special_tokens=True)
    return str(tokenizer.decode(added, skip_special_tokens=False)) if len(added) == 1 else ""


def submit(
    llm: Any,
    request: GenerateRequest,
    facts: ModelFacts,
    images: Sequence[Any] = (),
    *,
    edits: Edits | None = None,
    context_only: bool = False,
    rank: int | None = None,
    start: str = "",
) -> Any:
    """Start a request, with PIL `images` for its media. The result is an async iterator of itself.

    Its sampling parameters are those that the engine honours; `edits` are the others (`Support.split`).

    A context-only request computes the prompt and one token, and yields once. `rank` is the attention-DP rank that is
    to compute it, `start` the tokenizer's `start_text`. Raises InvalidRequest, EngineFailure and EngineDied.
    """
    sampling = request.sampling
    if context_only:
        sampling = replace(sampling, max_tokens=1)
    try:
        return llm.generate_async(
            inputs=_inputs(request, images, start),
            sampling_params=sampling_params(
                sampling,
                facts,
                edits=edits,
                num_prompt=num_prompt(request),
                templated=isinstance(request.media, Unexpanded) and not _begins(request.media, start),
            ),
            streaming=not context_only,
            disaggregated_params=_disaggregated_params(request, context_only=context_only),
            trace_headers=request.trace or None,
            scheduling_params=_scheduling_params(rank),
            cache_salt=_cache_salt(request),
        )
    except EngineError:
        raise
    except Exception as error:
        raise refusal(llm, error) from error


def encode(encoder: Any, prompt: str, images: Sequence[Any]) -> Any:
    """Start to encode PIL `images` for a text with placeholders. The result is awaitable. Raises as `submit` does."""
    from tensorrt_llm import SamplingParams as Parameters  # noqa: PLC0415

    try:
        return encoder.generate_async(
            inputs=_with_images(prompt, images),
            sampling_params=Parameters(add_special_tokens=False),
        )
    except Exception as error:
        raise refusal(encoder, error) from error


async def warm_up(llm: Any, prompt: tuple[int, ...], facts: ModelFacts) -> None:
    """Generate one token in the running loop, to which the first request binds the queues that are polled later."""
    started = time.monotonic()
    await probe(llm, prompt, facts)
    log.info("the first token took %.1f s", time.monotonic() - started)


async def probe(llm: Any, prompt: tuple[int, ...], facts: ModelFacts) -> None:
    """Generate one token. Raises whatever comes of it."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    await submit(llm, GenerateRequest(request_id="probe", prompt_token_ids=prompt, sampling=sampling), facts)


def sampling_params(
    sampling: SamplingParams,
    facts: ModelFacts,
    *,
    edits: Edits | None = None,
    num_prompt: int | None = None,
    templated: bool = False,
) -> Any:
    """Return a new object for each request, since the engine changes it. Raises InvalidRequest.

    `num_prompt` are the prompt's tokens, which samplers would count in the presence and frequency penalties.

    A `templated` prompt is text that contains its special tokens: the engine's tokenizer must not add any.
    """
    from tensorrt_llm import SamplingParams as Parameters  # noqa: PLC0415
    from tensorrt_llm.llmapi import GuidedDecodingParams  # noqa: PLC0415

    keywords = sampling_keywords(sampling, facts.eos_token_ids, installed())
    if templated:
        keywords["add_special_tokens"] = False
    if (bias := bias_of(sampling)) is not None:
        keywords["embedding_bias"] = _bias_tensor(bias, facts.vocab_size)
    if sampling.guide is not None:
        keywords["guided_decoding"] = GuidedDecodingParams(**guide_keywords(sampling.guide))
    if sampling.presence_penalty or sampling.frequency_penalty:
        keywords["prompt_ignore_length"] = num_prompt
    if edits is not None:
        keywords["logits_processor"] = _processor(edits)
    return Parameters(**keywords)


def refusal(llm: Any, error: Exception) -> EngineError:
    """Translate an error that a call raised instead of starting a request.

    While the executor runs, the error concerns only this request: a failed check of its arguments, or something that
    is not the client's fault, such as a processor that cannot be pickled.
    """
    from tensorrt_llm.llmapi import RequestError  # noqa: PLC0415

    said = f"{type(error).__name__}: {error}"
    if not is_alive(llm) or (isinstance(error, RuntimeError) and is_of_the_engine(said)):
        return EngineDied(f"the engine died: {said}")
    if isinstance(error, RequestError):
        return classified(str(error))
    if isinstance(error, _OF_THE_REQUEST) or is_a_refusal(said):
        return InvalidRequest(str(error) or said)
    return EngineFailure(f"the engine could not take this request: {said}")


def translate(llm: Any, error: Exception) -> EngineError:
    """Translate an error that a result raised.

    The message of a RequestError tells whose fault it is. Anything else concerns this request while the executor runs,
    for example an assertion about the result's own lists.
    """
    from tensorrt_llm.llmapi import RequestError  # noqa: PLC0415

    said = f"{type(error).__name__}: {error}"
    if not is_alive(llm):
        return EngineDied(f"the engine died: {said}")
    if isinstance(error, RequestError):
        return classified(str(error))
    return EngineFailure(f"the engine failed on this request: {said}")


def num_prompt(request: GenerateRequest) -> int | None:
    """Return the length of the prompt that the engine gets; None if it makes the tokens, of text and images."""
    if request.handoff is not None:
        return len(request.handoff.prompt_token_ids or request.prompt_token_ids)
    return None if isinstance(request.media, Unexpanded) else len(request.prompt_token_ids)


def _inputs(request: GenerateRequest, images: Sequence[Any], start: str) -> Any:
    """Return token ids, or text whose placeholders the engine expands: with ids it would drop embeddings of images.

    The input processors of models with images do not pass on `add_special_tokens`, so the text is given without the
    beginning of sequence that the tokenizer adds: a second one would shift every position.
    """
    if request.handoff is not None:
        return list(request.handoff.prompt_token_ids or request.prompt_token_ids)
    if not isinstance(request.media, Unexpanded):
        return list(request.prompt_token_ids)
    text = _text(request.media).removeprefix(start)
    return _with_images(text, images) if isinstance(request.media, MediaFiles) else {"prompt": text}


def _text(media: Unexpanded) -> str:
    return media.text if isinstance(media, MediaFiles) else media.prompt


def _begins(media: Unexpanded, start: str) -> bool:
    return bool(start) and _text(media).startswith(start)


def _with_images(prompt: str, images: Sequence[Any]) -> dict[str, Any]:
    """Return the inputs of a prompt with PIL images, frames of videos, and recordings."""
    data: dict[str, list[Any]] = {}
    for item in images:
        if isinstance(item, Frames):
            from tensorrt_llm.inputs.utils import VideoData  # noqa: PLC0415

            data.setdefault("video", []).append(VideoData(frames=item.frames, metadata=item.metadata))
        elif isinstance(item, tuple):
            data.setdefault("audio", []).append(item)
        else:
            data.setdefault("image", []).append(item)
    return {"prompt": prompt, "multi_modal_data": data}


def _cache_salt(request: GenerateRequest) -> str | None:
    """Return the salt of KV blocks.

    It is unique for prompts with images, for which 1.2.1 does not support block reuse, and for prompts whose
    log-probabilities are wanted, as there are none of reused blocks.
    """
    alone = (
        isinstance(request.media, Unexpanded)
        or (request.handoff is not None and request.handoff.prompt_token_ids)
        or request.sampling.prompt_logprobs is not None
    )
    return f"{request.cache_salt}/{secrets.token_hex(16)}" if alone else request.cache_salt or None


def _disaggregated_params(request: GenerateRequest, *, context_only: bool) -> Any:
    from tensorrt_llm.executor.result import Logprob  # noqa: PLC0415
    from tensorrt_llm.llmapi import DisaggregatedParams  # noqa: PLC0415

    if request.handoff is not None:
        keywords = generation_keywords(request.handoff, installed(), Logprob)
        try:
            return DisaggregatedParams(**keywords)
        except (AssertionError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the handoff cannot be read: {error}", "handoff") from error
    if context_only:
        return DisaggregatedParams(**context_keywords(request.media, installed()))
    return DisaggregatedParams(**local_keywords(request.media)) if isinstance(request.media, Encoding) else None


def _scheduling_params(rank: int | None) -> Any:
    """Return the scheduling parameters that pin a request to a rank. Both fields are set: their defaults differ between
    releases (#14276)."""
    if rank is None:
        return None
    from tensorrt_llm.scheduling_params import SchedulingParams  # noqa: PLC0415

    return SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)


def _bias_tensor(bias: Any, vocab_size: int) -> Any:
    import torch  # noqa: PLC0415

    tensor = torch.full((vocab_size,), bias.get(-1, 0.0), dtype=torch.float32)
    for token, value in bias.items():
        if token >= 0:
            tensor[token] = value
    return tensor


def _processor(edits: Edits) -> Any:
    from engine.trtllm.processors import ProcessorAdapter  # noqa: PLC0415 - needs torch

    return ProcessorAdapter([factory(name) for name in edits.sampling.processors], edits)
