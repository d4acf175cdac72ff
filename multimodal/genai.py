"""What a trace says of a generation, in OpenTelemetry's words for generative AI and, where these are new, in the older ones too."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine import trace
from engine.types import SamplingParams


def describe_request(operation: str, model: str, answer_id: str, params: Sequence[SamplingParams]) -> None:
    """Tell the request's span what was asked for. `params`: of each choice."""
    if (span := trace.current.get()) is None:
        return
    first, plain = params[0], SamplingParams(max_tokens=0)
    attributes: dict[str, trace.Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "trellis",
        "gen_ai.system": "trellis",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": answer_id,
        "gen_ai.request.max_tokens": first.max_tokens,
    }
    for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"):
        if (value := getattr(first, name)) != getattr(plain, name):
            attributes[f"gen_ai.request.{name}"] = value
    if len(params) > 1:
        attributes["gen_ai.request.choice.count"] = len(params)
    span.set(attributes)


def describe_answer(span: trace.Span, usage: Mapping[str, Any], reasons: Sequence[str]) -> None:
    """Tell the request's span what came of it. `usage`: as the answer has it; `reasons`: of the choices that have finished."""
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    span.set(
        {
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.output_tokens": completion,
            "gen_ai.usage.completion_tokens": completion,
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.response.finish_reasons": reasons,
        }
    )
