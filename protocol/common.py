"""Fields that chat and completion requests share: OpenAI's sampling, our extensions, and fields ignored or refused."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

Finite = Annotated[float, Field(allow_inf_nan=False)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]

# Bounds far above any use, checked before the values: a long list costs one error, not one for each of its values.
MAX_MESSAGES = 1 << 14
MAX_TEXT_BYTES = 4 << 20
MAX_BODY_VALUES = 1 << 18
"""The defaults of the settings that bound how long parsing a body may hold up the event loop: about 30 ms."""
MAX_PROMPTS = 1 << 11
TokenIds = Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]
Strings = Annotated[list[str], Field(max_length=1 << 16, fail_fast=True)]


def _restored(url: str, info: ValidationInfo) -> str:
    restored: str = info.context(url) if callable(info.context) else url
    return restored


LongUrl = Annotated[str, AfterValidator(_restored)]
"""A URL that may have been cut out of the body: the validation's context, if callable, returns the original."""


class Wire(BaseModel):
    """JSON from a client: types are not coerced, unknown fields are kept, to be reported."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Wire):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """`type` is text, json_object or json_schema and, beyond OpenAI, regex, grammar (or ebnf) or choice.

    Beyond OpenAI, json_object may have a `schema`.
    """

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    regex: str | None = None
    grammar: str | None = None
    choices: Strings | None = None


class StructuredOutputs(Wire):
    """Guided decoding beside `response_format`; at most one."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None

    # Refused by name when it is set (`routers/fields.py`).
    structural_tag: Any = None


class GenerationFields(Wire):
    """Sampling, stopping and answering, the same for chat and completions. Null means the default everywhere."""

    model: str | None = None
    max_tokens: Int32 | None = None
    temperature: Finite | None = None
    top_p: Finite | None = None
    n: Int32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Strings | None = None
    seed: Int64 | None = None
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    logit_bias: Annotated[dict[str, Finite], Field(max_length=1 << 16, fail_fast=True)] | None = None
    response_format: ResponseFormat | None = None

    # Extensions, as vLLM and trtllm-serve spell them.
    top_k: Int32 | None = None
    min_p: Finite | None = None
    repetition_penalty: Finite | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Int32 | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Strings | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")] | None = None

    # Accepted and without effect: they ask for nothing that changes the answer here.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    verbosity: Any = None
    prediction: Any = None
    parallel_tool_calls: Any = None
    spaces_between_special_tokens: Any = None
    length_penalty: Any = None
    early_stopping: Any = None

    # Refused by name when they are set (`routers/fields.py`).
    best_of: Any = None
    structural_tag: Any = None
    use_beam_search: Any = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    lora_request: Any = None
    disaggregated_params: Any = None
    kv_transfer_params: Any = None


class PromptTokensDetails(BaseModel):
    """`image_tokens` is there if the prompt has images: the part of its tokens that stand for them."""

    cached_tokens: int
    image_tokens: int | None = None


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    """`prompt_tokens` counts each prompt once, whatever n; `completion_tokens` is over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
