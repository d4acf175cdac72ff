"""Messages between Dynamo's frontend and a worker that takes token ids.

They are the parts of `PreprocessedRequest` and `LLMEngineOutput` of Dynamo 1.6 that concern a worker; other fields are
ignored.
"""

from typing import Annotated, Any

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0)]


class DynamoStops(msgspec.Struct, frozen=True):
    """Conditions that end a sequence. The frontend checks stop strings, since it has the text."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    stop_token_ids_visible: list[TokenId] | None = None
    stop_token_ids_hidden: list[TokenId] | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class DynamoGuides(msgspec.Struct, frozen=True):
    """Guides for the output; a request has one of them at most."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None


class DynamoSampling(msgspec.Struct, frozen=True):
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    use_beam_search: bool | None = None
    guided_decoding: DynamoGuides | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words_token_ids: list[list[TokenId]] | None = None


class DynamoOutputOptions(msgspec.Struct, frozen=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class DynamoRouting(msgspec.Struct, frozen=True):
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    """Higher is served first."""


class DynamoPrefill(msgspec.Struct, frozen=True):
    """The prefill worker's answer, which the frontend passes on to the decode worker."""

    disaggregated_params: dict[str, Any]


class DynamoExtras(msgspec.Struct, frozen=True):
    """The chat as the client sent it, with the URLs of media left out, and as the template has rendered it."""

    messages: Any = None
    formatted_prompt: str | None = None


class DynamoRequest(msgspec.Struct, frozen=True):
    token_ids: list[int]
    stop_conditions: DynamoStops = DynamoStops()
    sampling_options: DynamoSampling = DynamoSampling()
    output_options: DynamoOutputOptions = DynamoOutputOptions()
    routing: DynamoRouting | None = None
    prefill_result: DynamoPrefill | None = None
    multi_modal_data: dict[str, list[dict[str, Any]]] | None = None
    """Files by type of content part (`image_url`), in order: {"Url": "…"} each."""
    prompt_embeds: str | None = None
    encoder_result: dict[str, Any] | None = None
    """The answer of an encode worker, which the frontend passes to the other workers."""
    extra_args: DynamoExtras | None = None
