"""TensorRT-LLM's sampling parameters as those of our engines."""

import inspect
import json
import pickle
from typing import Any

from engine.types import EngineInfo, Guide, SamplingParams
from tensorrt_llm._contract import NEWEST
from tensorrt_llm._errors import RequestError

_UNSUPPORTED = (
    "use_beam_search",
    "no_repeat_ngram_size",
    "top_p_min",
    "top_p_reset_ids",
    "top_p_decay",
    "lookahead_config",
)


def stop_ids(params: Any) -> tuple[int, ...]:
    """The ids that end a sequence besides the end id."""
    return tuple(params.stop_token_ids or ())


def engine_sampling(params: Any, info: EngineInfo, guided: bool) -> dict[str, Any]:
    """Return fields of our SamplingParams, except `max_tokens` and `processors`.

    Raises RequestError for what our engines cannot do.
    """
    for name in _UNSUPPORTED:
        if getattr(params, name):
            raise RequestError(f"{name} is not supported")
    temperature = 1.0 if params.temperature is None else params.temperature
    ends = {params.end_id, *stop_ids(params)}
    # Our engines end at the model's ids, or at none of them; the contract names the ids that count.
    native = not params.ignore_eos and params.end_id in info.eos_token_ids and ends >= set(info.eos_token_ids)
    stops = (
        stop_ids(params)
        if native or params.ignore_eos or params.end_id in {None, -1}
        else (*stop_ids(params), params.end_id)
    )
    if native:
        stops = tuple(token for token in stops if token not in info.eos_token_ids or token == params.end_id)
    bad = [(token,) for token in params.bad_token_ids or ()] + [tuple(word) for word in params._bad_word_ids or ()]
    return {
        "min_tokens": params.min_tokens or 0,
        "temperature": 0.0 if params._greedy_decoding else temperature,
        "top_p": 1.0 if params.top_p is None else params.top_p,
        "top_k": params.top_k or 0,
        "min_p": params.min_p or 0.0,
        "repetition_penalty": 1.0 if params.repetition_penalty is None else params.repetition_penalty,
        "presence_penalty": params.presence_penalty or 0.0,
        "frequency_penalty": params.frequency_penalty or 0.0,
        "logit_bias": _bias(params.embedding_bias, info.vocab_size),
        "bad_words": tuple(bad),
        "seed": params.seed,
        "ignore_eos": not native,
        "stop_token_ids": tuple(dict.fromkeys(stops)),
        "logprobs": params.logprobs if NEWEST else params.logprobs or None,
        "prompt_logprobs": params.prompt_logprobs if NEWEST else params.prompt_logprobs or None,
        "guide": _guide(params.guided_decoding, guided),
    }


def checked_processors(params: Any) -> list[Any]:
    """Return copies of the request's logits processors, as worker processes would get them.

    Raises whatever pickling raises.
    """
    given = params.logits_processor
    processors = [] if given is None else given if isinstance(given, list) else [given]
    copies = [pickle.loads(pickle.dumps(processor)) for processor in processors]  # noqa: S301 - our own bytes, as the real one does
    for processor in copies:
        count = len(inspect.signature(processor).parameters)
        assert count in {4, 5}, f"a logits processor takes 4 or 5 parameters, not {count}"
    return copies


class Processor:
    """A documented logits processor behind our engines' interface."""

    def __init__(self, processor: Any, request_id: int) -> None:
        self._processor = processor
        self._request_id = request_id
        self._tail = (None,) * (len(inspect.signature(processor).parameters) - 3)

    def __call__(self, token_ids: Any, logits: Any) -> None:
        self._processor(self._request_id, logits.view(1, 1, -1), [list(token_ids)], *self._tail)


def sampling_of(fields: dict[str, Any], **changes: Any) -> SamplingParams:
    return SamplingParams(**{**fields, **changes})


def _bias(bias: Any, vocab_size: int) -> dict[int, float]:
    if bias is None:
        return {}
    if tuple(bias.shape) != (vocab_size,):
        raise RequestError(f"embedding_bias has the shape {tuple(bias.shape)}, not ({vocab_size},)")
    return {token: value for token, value in enumerate(bias.tolist()) if value}


def _guide(guided: Any, enabled: bool) -> Guide | None:
    if guided is None:
        return None
    if not enabled:
        raise RequestError("guided decoding needs guided_decoding_backend")
    if guided.structural_tag is not None:
        raise RequestError("structural tags are not supported")
    if guided.json_object:
        return Guide("json_object")
    if guided.json is not None:
        schema = guided.json if isinstance(guided.json, str | dict) else guided.json.model_json_schema()
        return Guide("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    if guided.regex is not None:
        return Guide("regex", guided.regex)
    return None if guided.grammar is None else Guide("grammar", guided.grammar)
