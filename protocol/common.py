"""Fields that chat and completion requests share: OpenAI's sampling, our extensions, and fields ignored or refused.

The docstring below a field is its description at /openapi.json, and the JSON after `Example:` its example there
(`server/http/schemas.py` reads both from this source; classes are created without them, and the server starts sooner).
Ranges and defaults are added from where they are applied: `multimodal/request.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

Finite = Annotated[float, Field(allow_inf_nan=False)]
Int32 = Annotated[int, Field(ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]

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


class InputAudio(Wire):
    """A recording in the request."""

    data: LongUrl
    """The file in base64. Example: "UklGRiQAAABXQVZF" """
    format: Literal["wav", "flac", "mp3", "ogg", "opus"]
    """Its format; the file's own first bytes decide. Example: "wav" """

    @property
    def url(self) -> str:
        """A data URL with the file."""
        return f"data:audio/{self.format};base64,{self.data}"


class StreamOptions(Wire):
    """Additional contents of a stream."""

    include_usage: bool | None = None
    """Send the usage of the whole request in a last chunk whose `choices` are empty; in all others `usage` is null.
    Example: true"""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage of its choice so far, as in vLLM; has no effect without `include_usage`.
    Example: false"""
    include_obfuscation: bool | None = None
    """Accepted and ignored: chunks are not padded. Example: false"""


class JsonSchemaFormat(Wire):
    """A JSON schema for the output."""

    name: str | None = None
    """Name of the schema; without effect. Example: "person" """
    description: str | None = None
    """Purpose of the schema; has no effect. Example: "A person and an age" """
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    """The schema. Example: {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}"""
    strict: bool | None = None
    """Accepted and ignored: the output always follows the schema. Example: true"""


class ResponseFormat(Wire):
    """Format of the output; `type` names the field that defines it."""

    type: str
    """`text` (anything), `json_object` or `json_schema` and, beyond OpenAI, `regex`, `grammar` (or `ebnf`), `choice` or
    `structural_tag`. Example: "json_object" """
    json_schema: JsonSchemaFormat | None = None
    """The schema, for `json_schema`. Example: {"name": "person", "schema": {"type": "object"}}"""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """A schema for `json_object` or `json_schema`, beyond OpenAI. Example: {"type": "object"}"""
    regex: str | None = None
    """The regular expression, for `regex`. Example: "[0-9]{4}" """
    grammar: str | None = None
    """The EBNF grammar, whose first rule is `root`, for `grammar`. Example: "root ::= \\"yes\\" | \\"no\\"" """
    choices: Strings | None = None
    """The strings of which the output is one, for `choice`. Example: ["yes", "no"]"""
    format: dict[str, Any] | None = None
    """Format of the output for `structural_tag`, as defined by xgrammar. Example: {"type": "json_schema",
    "json_schema": {"type": "object"}}"""
    structures: Annotated[list[dict[str, Any]], Field(max_length=1 << 10)] | None = None
    """Tags and what they contain, for `structural_tag` in xgrammar's older form, with `triggers`.
    Example: [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}]"""
    triggers: Strings | None = None
    """Texts with which tags of `structures` begin. Example: ["<f"]"""


class KvTransferParams(Wire):
    """Options for keeping the KV blocks of a request, in LMCache's spelling for vLLM."""

    skip_save: bool | None = Field(None, alias="lmcache.skip_save")
    """Do not copy the request's KV blocks to the host or the disk. Example: true"""


class StructuredOutputs(Wire):
    """Constraint on the output in vLLM's spelling; at most one field may be set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    """JSON schema, as an object or as text. Example: {"type": "object"}"""
    regex: str | None = None
    """Regular expression. Example: "[0-9]{4}" """
    choice: Strings | None = None
    """Strings of which the output is one. Example: ["yes", "no"]"""
    grammar: str | None = None
    """EBNF grammar, whose first rule is `root`. Example: "root ::= \\"yes\\" | \\"no\\"" """
    json_object: bool | None = None
    """Any JSON object. Example: true"""
    structural_tag: dict[str, Any] | str | None = None
    """A structural tag of xgrammar, as an object or as text.
    Example: {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "object"}}}"""


class PredictionPart(Wire):
    """A part of a prediction."""

    type: Literal["text"]
    """Always `text`. Example: "text" """
    text: str
    """The text. Example: "Hello" """


class Prediction(Wire):
    """The predicted answer."""

    type: Literal["content"]
    """Always `content`. Example: "content" """
    content: str | Annotated[list[PredictionPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    """The text, or the parts of it. Example: "Hello" """


class ModelFields(Wire):
    """Fields of every request to the model."""

    model: str | None = None
    """Name of the served model, as GET /v1/models has it."""


class SamplingFields(ModelFields):
    """Sampling and stopping, the same for all APIs of OpenAI's that generate. Null means the default everywhere."""

    temperature: Finite | None = None
    """Randomness: logits are divided by it. 0 always takes the most likely token. Example: 0.7"""
    top_p: Finite | None = None
    """Sample from the most likely tokens whose probabilities add up to this; 1 samples from all. Example: 0.9"""
    stream: bool | None = None
    """Send the answer as server-sent events while it is generated. Example: false"""
    stop: str | Strings | None = None
    """Text, or texts, at which a choice ends; the answer does not have it. Example: ["\\n\\n"]"""
    seed: Int64 | None = None
    """The same seed, prompt and parameters give the same output; choices of one request have seeds of their own.
    Without, each answer is another. Example: 7"""
    presence_penalty: Finite | None = None
    """Subtracted from the logits of tokens that the output has already; negative values favour them. Example: 0.5"""
    frequency_penalty: Finite | None = None
    """The same for each time that the output has a token. Example: 0.5"""
    logit_bias: Annotated[dict[str, Finite], Field(max_length=1 << 16, fail_fast=True)] | None = None
    """Added to the logits of tokens, by token id; -100 nearly forbids one. Example: {"50": -100}"""

    # Extensions, as vLLM and trtllm-serve spell them.
    top_k: Int32 | None = None
    """Sample from this many of the most likely tokens; 0 and -1 sample from all. Example: 40"""
    min_p: Finite | None = None
    """Leave out tokens less likely than this fraction of the most likely one's probability. Example: 0.05"""
    repetition_penalty: Finite | None = None
    """Divides the logits of tokens of prompt and output (multiplies negative ones); 1 is off. Example: 1.1"""
    min_tokens: Int32 | None = None
    """Number of tokens before which a choice does not end, at most `max_tokens`. Example: 0"""
    ignore_eos: bool | None = None
    """Go on after the end-of-sequence token, up to `max_tokens`. Example: false"""
    stop_token_ids: TokenIds | None = None
    """Token ids that end a choice, in addition to the model's own. Example: [2]"""
    include_stop_str_in_output: bool | None = None
    """Leave the stop string, or the text of the stop token, in the answer. Example: false"""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Example: true"""
    bad_words: Strings | None = None
    """Texts that the output does not have, at the start of a line or after a space. Example: ["foo"]"""
    allowed_token_ids: TokenIds | None = None
    """The only token ids that may be sampled; empty allows all. Example: [50, 51]"""
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    """Requests with lower numbers are served first: 1 waits as if it had come 10 seconds later. Example: 0"""
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """Only requests with the same salt share cached prompts. Example: "tenant-1" """
    kv_transfer_params: KvTransferParams | None = None
    """Options for keeping the KV blocks of the request. Example: {"lmcache.skip_save": true}"""


class GenerationFields(SamplingFields):
    """Fields that chat and completions share."""

    max_tokens: Int64 | None = None
    """Maximum number of tokens to generate for each choice; prompt and output together must fit the model's context.
    Default: 16 for completions, all that fit for chats. Example: 64"""
    n: Int32 | None = None
    """Number of choices for each prompt; its maximum holds for the choices of all prompts together. Example: 1"""
    stream_options: StreamOptions | None = None
    """Options of a stream; only with `stream`. Example: {"include_usage": true}"""
    response_format: ResponseFormat | None = None
    """Format of the output. Example: {"type": "text"}"""

    # Extensions, as vLLM and trtllm-serve spell them.
    prompt_logprobs: Int32 | None = None
    """Return the log-probabilities of the prompt's tokens, each with this many alternatives. Example: 0"""
    return_token_ids: bool | None = None
    """Return the token ids of prompt and output. Example: false"""
    truncate_prompt_tokens: Int32 | None = None
    """Keep this many tokens from the prompt's end; -1 keeps what leaves room for `max_tokens`. Example: 128"""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens (of the sequence's begin, say) to the prompt. Default: true for completions,
    false for chats, whose template adds them. Example: false"""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the output. A request may have only one field that constrains it. Example: {"regex": "[0-9]{4}"}"""
    guided_json: dict[str, Any] | str | None = None
    """JSON schema that the output must match, as an object or as text. Example: {"type": "object"}"""
    guided_regex: str | None = None
    """Regular expression that the output must match. Example: "[0-9]{4}" """
    guided_choice: Strings | None = None
    """Strings of which the output is one. Example: ["yes", "no"]"""
    guided_grammar: str | None = None
    """EBNF grammar that the output must match, whose first rule is `root`. Example: "root ::= \\"yes\\" | \\"no\\"" """
    regex: str | None = None
    """The same as `guided_regex`. Example: "[0-9]{4}" """
    grammar: str | None = None
    """The same as `guided_grammar`. Example: "root ::= \\"yes\\" | \\"no\\"" """
    choice: Strings | None = None
    """The same as `guided_choice`. Example: ["yes", "no"]"""
    prediction: Prediction | None = None
    """Text that much of the answer may repeat. With speculation (SPECULATIVE=ngram or suffix) its tokens are proposed
    to the model, so that they come sooner; the answer does not depend on it.
    Example: {"type": "content", "content": "def add(a, b):\\n    return a + b"}"""
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")] | None = None
    """Becomes part of the answer's `id`, instead of the header x-request-id. Example: "request-1" """

    # Accepted and without effect: they ask for nothing that changes the answer here.
    user: Any = None
    """Accepted and ignored. Example: "user-1" """
    store: Any = None
    """Accepted and ignored: nothing is stored. Example: false"""
    metadata: Any = None
    """Accepted and ignored. Example: {"run": "1"}"""
    service_tier: Any = None
    """Accepted and ignored. Example: "auto" """
    safety_identifier: Any = None
    """Accepted and ignored. Example: "user-1" """
    prompt_cache_key: Any = None
    """Accepted and ignored: equal prefixes are found without it. Example: "chats" """
    prompt_cache_retention: Any = None
    """Accepted and ignored. Example: "24h" """
    prompt_cache_options: Any = None
    """Accepted and ignored. Example: {}"""
    verbosity: Any = None
    """Accepted and ignored. Example: "low" """
    parallel_tool_calls: Any = None
    """Accepted and ignored. Example: true"""
    spaces_between_special_tokens: Any = None
    """Accepted and ignored. Example: true"""
    length_penalty: Any = None
    """Accepted and ignored: there is no beam search. Example: 1"""
    early_stopping: Any = None
    """Accepted and ignored: there is no beam search. Example: false"""

    # Refused by name when they are set (`routers/fields.py`).
    best_of: Any = None
    """Not supported, unless it is the same as `n`, of which this schema has 1."""
    structural_tag: Any = None
    """Not supported."""
    use_beam_search: Any = None
    """Not supported."""
    prompt_embeds: Any = None
    """Not supported."""
    logits_processors: Any = None
    """Not supported in requests; the server's settings name them."""
    lora_request: Any = None
    """Not supported."""
    disaggregated_params: Any = None
    """Not supported: a server's role decides."""
    return_tokens_as_token_ids: Any = None
    """Not supported; `return_token_ids` gives the ids beside the text."""


class PromptTokensDetails(BaseModel):
    """Parts of `prompt_tokens`."""

    cached_tokens: int
    """Tokens whose KV blocks were cached."""
    audio_tokens: int | None = None
    """Tokens of the prompt that stand for audio, if any."""
    image_tokens: int | None = None
    """Tokens that stand for images, if the prompt has any."""


class CompletionTokensDetails(BaseModel):
    """Parts of `completion_tokens`."""

    reasoning_tokens: int
    """Tokens of reasoning before the answer."""
    accepted_prediction_tokens: int | None = None
    """Tokens that speculation proposed and the model accepted, if the request has a `prediction`."""
    rejected_prediction_tokens: int | None = None
    """Tokens that speculation proposed and the model rejected, if the request has a `prediction`. They are not in
    `completion_tokens`."""


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    """Tokens of the prompts, each counted once, whatever `n`."""
    completion_tokens: int
    """Tokens generated, of all choices."""
    total_tokens: int
    """The sum of both."""
    prompt_tokens_details: PromptTokensDetails
    """Parts of `prompt_tokens`."""
    completion_tokens_details: CompletionTokensDetails
    """Parts of `completion_tokens`."""
