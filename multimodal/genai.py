"""Attributes of a generation's span: OpenTelemetry's for generative AI, and the older ones where those are new."""

from collections.abc import Sequence

from engine import trace
from engine.types import SamplingParams
from multimodal.answers.choices import TokenCounts


def describe_request(operation: str, model: str, answer_id: str, params: Sequence[SamplingParams]) -> None:
    """Note on the request's span what was asked for; `params` are those of each choice."""
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


def describe_answer(span: trace.Span, counts: TokenCounts, reasons: Sequence[str]) -> None:
    """Note on the request's span what came of it; `reasons` are those of the choices that have finished."""
    span.set(
        {
            "gen_ai.usage.input_tokens": counts.prompt,
            "gen_ai.usage.prompt_tokens": counts.prompt,
            "gen_ai.usage.output_tokens": counts.completion,
            "gen_ai.usage.completion_tokens": counts.completion,
            "gen_ai.usage.cache_read.input_tokens": counts.cached,
            "gen_ai.response.finish_reasons": reasons,
        }
    )
