"""Converts sampling parameters and guides to keywords of TensorRT-LLM's `SamplingParams` and `GuidedDecodingParams`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from engine.trtllm.versions import PackageVersion
from engine.types import GUIDE_KINDS, Guide, GuideKind, SamplingParams

MASKED = -1e9
"""Bias that masks a token. Minus infinity could become NaN when combined with another."""


def sampling_keywords(
    sampling: SamplingParams, eos_token_ids: Sequence[int], version: PackageVersion
) -> dict[str, Any]:
    """Return keywords for one request.

    They are of the parameters that the engine honours (`engine/trtllm/support.py`); the caller adds `embedding_bias`,
    `logits_processor`, `guided_decoding` and `prompt_ignore_length`. With an explicit `end_id` the engine does not ask
    its tokenizer, so further end-of-sequence ids are passed as stop ids. Stop tokens stay in the output: a delta ends
    with the token that ended the sequence.
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
        "logprobs": _at_least(sampling.logprobs, version.least_logprobs),
        "prompt_logprobs": _at_least(sampling.prompt_logprobs, version.least_logprobs),
        "repetition_penalty": _unless(sampling.repetition_penalty, 1.0),
        "presence_penalty": _unless(sampling.presence_penalty, 0.0),
        "frequency_penalty": _unless(sampling.frequency_penalty, 0.0),
    }
    keywords |= {"top_k": 1} if sampling.temperature == 0 else _drawing(sampling)
    return {name: value for name, value in keywords.items() if value is not None}


def bias_of(sampling: SamplingParams) -> Mapping[int, float] | None:
    """Return the bias by token id; -1 stands for all other ids. None means no bias."""
    if sampling.allowed_token_ids:
        return {-1: MASKED, **{token: sampling.logit_bias.get(token, 0.0) for token in sampling.allowed_token_ids}}
    return sampling.logit_bias or None


def guides_of(backend: str | None) -> tuple[GuideKind, ...]:
    """Return the guides that a `guided_decoding_backend` follows. Structural tags are xgrammar's."""
    return tuple(kind for kind in GUIDE_KINDS if backend and (kind != "structural_tag" or backend == "xgrammar"))


def guide_keywords(guide: Guide) -> dict[str, Any]:
    """Return the keyword for a guide. A choice becomes a regular expression, as there is no such guide."""
    match guide.kind:
        case "json_schema":
            return {"json": guide.spec}
        case "json_object":
            return {"json_object": True}
        case "regex":
            return {"regex": guide.spec}
        case "grammar":
            return {"grammar": guide.spec}
        case "structural_tag":
            return {"structural_tag": guide.spec}
        case "choice":
            choices = [choice for choice in json.loads(guide.spec) if choice is not None]
            if not choices:
                raise InvalidRequest("a choice needs at least one string", "guide")
            return {"regex": "(" + "|".join(map(re.escape, choices)) + ")"}


def _drawing(sampling: SamplingParams) -> dict[str, Any]:
    """Return temperature and truncation. The temperature is always set; without any of these, decoding is greedy."""
    return {
        "temperature": sampling.temperature,
        "top_p": _unless(sampling.top_p, 1.0),
        "top_k": sampling.top_k or None,
        "min_p": _unless(sampling.min_p, 0.0),
    }


def _at_least(asked: int | None, least: int) -> int | None:
    return None if asked is None else max(least, asked)


def _unless(value: float, neutral: float) -> float | None:
    return None if value == neutral else value
