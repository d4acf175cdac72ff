"""What a trace says of a generation, in OpenTelemetry's words for generative AI and, where these are new, in the older ones too."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine import trace
from engine.types import SamplingParams


def describe_request(operation: str, model: str, answer_id: str, params: Sequence[SamplingParams]) -> None:
    """Tell the request's span what was asked for. `params`: of each choice."""
    if (span := trace.current.get()) is None:
        return
    first = params[0]
    attributes: dict[str, trace.Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "trellis",
        "gen_ai.system": "trellis",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": answer_id,
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": first.temperature,
        "gen_ai.request.top_p": first.top_p,
        "gen_ai.request.top_k": first.top_k,
        "gen_ai.request.frequency_penalty": first.frequency_penalty,
        "gen_ai.request.presence_penalty": first.presence_penalty,
        "gen_ai.request.choice.count": len(params),
    }
    if first.seed is not None:
        attributes["gen_ai.request.seed"] = first.seed
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
