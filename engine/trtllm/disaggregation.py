"""Converts `DisaggregatedParams` to and from the handoffs and encodings of our replicas."""

from typing import Any, TypeVar

import msgspec

from engine.errors import EngineFailure, InvalidRequest
from engine.handoff import VERSION
from engine.media import Encoding, PromptMedia, Unexpanded
from engine.types import Delta, GenerateRequest, Handoff, Held

BACKEND = "trtllm"
T = TypeVar("T")


class ContextState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a context worker's DisaggregatedParams.

    The embeddings' handles are not among them: they were used up there, and a generation worker refuses them.
    """

    ctx_request_id: int
    first_gen_tokens: list[int]
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None


class EncoderState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The encoder's result for a prompt's media. A handle is the dict of a shared tensor, to be opened exactly once."""

    multimodal_embedding_handles: list[dict[str, Any]]
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None


def context_keywords(media: PromptMedia | None) -> dict[str, Any]:
    """Return keywords of DisaggregatedParams for a prefill. Raises InvalidRequest."""
    fields = _fields(_decoded(media, EncoderState)) if isinstance(media, Encoding) else {}
    return {"request_type": "context_only", **fields}


def generation_keywords(handoff: Handoff) -> dict[str, Any]:
    """Return keywords of DisaggregatedParams for a decode. Raises InvalidRequest."""
    return {"request_type": "generation_only"} | _fields(_decoded(handoff, ContextState))


def recomputed(request: GenerateRequest) -> GenerateRequest:
    """Return a plain request that goes on after a handoff's tokens without its state. Raises InvalidRequest.

    The tokens become part of the prompt, so the presence and frequency penalties no longer count them.
    """
    assert request.handoff is not None
    if request.sampling.guide is not None or request.handoff.prompt_token_ids:
        what = "a guide" if request.sampling.guide is not None else "images"
        raise InvalidRequest(f"the handoff's KV blocks are needed: a request with {what} cannot go on alone", "handoff")
    first = request.handoff.first.token_ids
    sampling = msgspec.structs.replace(
        request.sampling,
        max_tokens=request.sampling.max_tokens - len(first),
        min_tokens=max(0, request.sampling.min_tokens - len(first)),
        prompt_logprobs=None,
    )
    prompt = (*request.prompt_token_ids, *first)
    return msgspec.structs.replace(request, prompt_token_ids=prompt, sampling=sampling, handoff=None)


def local_keywords(encoding: Encoding) -> dict[str, Any]:
    """Return keywords of DisaggregatedParams for a request that only has its images encoded elsewhere.

    Raises InvalidRequest.
    """
    return context_keywords(encoding) | {"request_type": "context_and_generation"}


def held_of(result: Any, delta: Delta, request: GenerateRequest) -> Delta:
    """Return `delta`, the only one of a context-only result, with the state that it keeps for decode.

    Its one token, though the last that was allowed, does not end the request. Raises EngineFailure.
    """
    if delta.finish_reason == "stop":
        return delta
    params = result.outputs[0].disaggregated_params
    if params is None or params.ctx_request_id is None or not params.first_gen_tokens:
        raise EngineFailure(
            "the engine computed the prompt but handed nothing over: is cache_transceiver_config.backend set?"
        )
    state = msgspec.msgpack.encode(ContextState(**_values(params, ContextState)))
    held = Held(state, tuple(result.prompt_token_ids) if isinstance(request.media, Unexpanded) else ())
    return msgspec.structs.replace(delta, finish_reason=None, held=held)


def encoding_of(result: Any, prompt: str) -> Encoding:
    """Return the encoding in an encoder's result.

    The result's own parameters have a handle for each image; those of `outputs` are filled too early. Without either,
    `mm_embedding_handle` is the only handle. Raises EngineFailure.
    """
    params = result.disaggregated_params
    values = {} if params is None else _values(params, EncoderState)
    handles = values.get("multimodal_embedding_handles")
    if isinstance(handles, tuple):  # 1.2.1 wraps the list in a tuple when the request had parameters of its own
        handles = handles[0]
    if not handles and result.mm_embedding_handle is not None:
        handles = [result.mm_embedding_handle]
    if not handles:
        raise EngineFailure("the encoder returned no embeddings")
    hashes = values.get("multimodal_hashes")
    if hashes is not None and len(hashes) != len(handles):
        values["multimodal_hashes"] = None  # images share a handle: 1.2.1 takes a hash for each handle, or none
    state = EncoderState(**{**values, "multimodal_embedding_handles": handles})
    return Encoding(version=VERSION, backend=BACKEND, prompt=prompt, state=msgspec.msgpack.encode(state))


def _values(params: Any, state: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(params, name) for name in state.__struct_fields__}


def _decoded(source: Handoff | Encoding, state: type[T]) -> T:
    name = type(source).__name__.lower()
    if source.backend != BACKEND:
        raise InvalidRequest(f"the {name} is of the {source.backend} engine; this replica runs {BACKEND}", name)
    try:
        return msgspec.msgpack.decode(source.state, type=state)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the {name} cannot be read: {error}", name) from error


def _fields(state: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(state).items() if value is not None}
