"""Our sampling parameters as keywords of TensorRT-LLM's `SamplingParams`, and guides as those of `GuidedDecodingParams`. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from engine.types import Guide, SamplingParams

MASKED = -1e9
"""A bias that no logit outweighs; minus infinity would become NaN where it meets another."""


def sampling_keywords(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Keywords for one request; `embedding_bias`, `logits_processor` and `guided_decoding` are made by the caller, from the functions
    below.

    An explicit `end_id` has the engine leave its tokenizer alone, so all further end-of-sequence ids are stop ids. Stop tokens are kept
    in the output: a delta ends with the token that ended the sequence.
    """
    ends = [] if sampling.ignore_eos else list(eos_token_ids)
    keywords: dict[str, Any] = {
        "end_id": eos_token_ids[0] if eos_token_ids else -1,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sorted({*ends[1:], *sampling.stop_token_ids}) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "max_tokens": max(1, sampling.max_tokens),
        "min_tokens": sampling.min_tokens or None,
        "seed": sampling.seed,
        "logprobs": wanted_logprobs(sampling.logprobs),
        "prompt_logprobs": wanted_logprobs(sampling.prompt_logprobs),
        "repetition_penalty": _unless(sampling.repetition_penalty, 1.0),
        "presence_penalty": _unless(sampling.presence_penalty, 0.0),
        "frequency_penalty": _unless(sampling.frequency_penalty, 0.0),
        "bad_token_ids": [words[0] for words in sampling.bad_words if len(words) == 1] or None,
    }
    keywords |= {"top_k": 1} if sampling.temperature == 0 else _drawing(sampling)
    return {name: value for name, value in keywords.items() if value is not None}


def wanted_logprobs(asked: int | None) -> int | None:
    """How many alternatives to ask for: there 0 means none at all, so that the sampled token alone takes 1."""
    return None if asked is None else max(1, asked)


def bias_of(sampling: SamplingParams) -> Mapping[int, float] | None:
    """What to add to the logits of which ids; the id -1 stands for all that are not named. None adds nothing."""
    if sampling.allowed_token_ids:
        return {-1: MASKED, **{token: sampling.logit_bias.get(token, 0.0) for token in sampling.allowed_token_ids}}
    return sampling.logit_bias or None


def bad_sequences(sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Bad words of several tokens. `bad_token_ids` takes single ones, and `bad` takes strings, which need the engine's tokenizer."""
    return tuple(words for words in sampling.bad_words if len(words) > 1)


def guide_keywords(guide: Guide) -> dict[str, Any]:
    """The one keyword for a guide. A choice becomes a regular expression, since there is no guide of that kind."""
    match guide.kind:
        case "json_schema":
            return {"json": guide.spec}
        case "json_object":
            return {"json_object": True}
        case "regex":
            return {"regex": guide.spec}
        case "grammar":
            return {"grammar": guide.spec}
        case "choice":
            choices = [choice for choice in json.loads(guide.spec) if choice is not None]
            if not choices:
                raise InvalidRequest("a choice needs at least one string", "guide")
            return {"regex": "(" + "|".join(map(re.escape, choices)) + ")"}


def _drawing(sampling: SamplingParams) -> dict[str, Any]:
    """Temperature and truncation; the temperature is always said, since without any of these the engine is greedy."""
    return {
        "temperature": sampling.temperature,
        "top_p": _unless(sampling.top_p, 1.0),
        "top_k": sampling.top_k or None,
        "min_p": _unless(sampling.min_p, 0.0),
    }


def _unless(value: float, neutral: float) -> float | None:
    return None if value == neutral else value
