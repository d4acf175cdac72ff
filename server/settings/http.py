"""Settings of the HTTP server, and limits of requests."""

from ipaddress import ip_address
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from multimodal.request import Limits
from protocol.batches import MAX_REQUESTS
from protocol.common import MAX_BODY_VALUES, MAX_MESSAGES, MAX_TEXT_BYTES
from server.settings.types import EMBEDDED, Names, OptionalBool, Secret, Secrets, Section


class HttpSettings(Section):
    """Settings of the server's address and of access to it."""

    group = "HTTP server"

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    api_processes: int = Field(0, ge=0, le=64)
    """Number of API processes that share the port and the engine; 0 fits the machine."""
    root_path: str = ""
    """Path prefix that a proxy strips."""
    api_keys: Secrets = ()
    """Comma-separated keys, one of which every route requires, except probes and metrics (OPEN_PROBES) and the files of
    the pages; empty leaves the server open.
    """
    open_probes: bool = True
    """Let /health, /health/ready and /metrics answer without an API key; /health/live always does."""
    internal_secret: Secret = None
    """Secret of the internal routes between replicas, and of the ranks that routers choose."""
    admin_key: Secret = None
    """Key of the routes for operators: /sleep, /wake_up, /is_sleeping, /release_memory and /resume_memory. Empty leaves
    them out.
    """
    cors_origins: Names = ()
    """Comma-separated origins of web pages that may call the server (CORS), such as https://chat.example.com; * allows
    all, empty none.
    """
    docs: bool = True
    """Serve /docs and /openapi.json."""
    page: OptionalBool = None
    """Serve a page to chat at /, and /openapi.json, from which it takes its fields. Empty serves it if HOST is a
    loopback address, but not to requests with headers that proxies add.
    """
    keep_alive_seconds: int = Field(75, ge=1)
    """Seconds that an idle connection stays open; must exceed the limit of a proxy in front."""
    sse_ping_seconds: float = Field(15.0, ge=0)
    """Seconds of silence in a stream before a keep-alive comment; 0 sends none."""
    shutdown_grace_seconds: float = Field(30.0, ge=0)
    """Seconds that running requests may continue after SIGTERM, SIGINT or SIGHUP."""

    @field_validator("api_processes", mode="after")
    @classmethod
    def _one_engine(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and not info.data.get("engine_process", True):
            raise ValueError(
                "several API processes share an engine in a process of its own: engine_process must be true"
            )
        return value

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address. Names other than localhost are taken for public ones."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def shows_page(self) -> bool:
        """Whether the page at / is served, by a role that answers chats."""
        return self.is_local if self.page is None else self.page


class MessageBatchSettings(Section):
    """Batches of messages, answered when there is nothing else to do."""

    group = "Batches of messages"

    batches_mb: int = Field(256, ge=0)
    """MiB of requests and results that are stored, in CACHE_DIR; 0 refuses batches."""
    batch_max_requests: int = Field(10_000, ge=1, le=MAX_REQUESTS)
    """Maximum number of requests in a batch. MAX_BODY_MB, MAX_TEXT_MB and MAX_BODY_VALUES bound them, too."""
    batch_concurrency: int = Field(4, ge=1)
    """Number of requests of batches that run at once, at the lowest priority."""


class ResponsesSettings(Section):
    """Responses that are kept, in the file responses.sqlite3 of the folder CACHE_DIR."""

    group = "Stored responses"

    responses_store_mb: int = Field(1024, ge=0)
    """Size of all stored responses in MiB, beyond which the oldest leave; 0 stores none."""
    responses_store_days: float = Field(30.0, gt=0)
    """Days after which a stored response leaves."""


class LimitSettings(Section):
    """Limits of a request."""

    group = "Limits of requests"

    max_body_mb: float = Field(64.0, gt=0)
    """Maximum size of a request body in MiB."""
    max_text_mb: float = Field(MAX_TEXT_BYTES / (1 << 20), gt=0)
    """Maximum size of the JSON in a request body in MiB, the data URLs of images not counted. Parsing it blocks the
    server: 4 MiB take about 30 ms.
    """
    max_body_values: int = Field(MAX_BODY_VALUES, ge=1)
    """Maximum number of JSON values in a request body; a field of an object counts 4, an object itself 10. Parsing them
    blocks the server: 262144 take about 30 ms.
    """
    body_timeout_seconds: float = Field(60.0, gt=0)
    """Seconds that a client may take to send its headers, and again to send its body."""
    send_timeout_seconds: float = Field(60.0, gt=0)
    """Seconds that a client may leave an answer unread; then its connection is closed and its request cancelled."""
    request_timeout_seconds: float = Field(Limits.request_timeout_seconds, gt=0)
    """Seconds that a whole request may take."""
    max_queue_size: int = Field(1024, ge=0)
    """Number of sequences that may wait for the engine; more are refused with 429. API processes share it equally."""
    queue_timeout_seconds: float = Field(60.0, gt=0)
    """Seconds that a request may wait for the engine before it is refused with 503."""
    min_priority: int = Field(Limits.min_priority, ge=-1000, le=1000)
    """Most urgent priority that a request can have; smaller numbers count as this one. A client that may be more urgent
    than others can keep them waiting forever.
    """
    max_n: int = Field(Limits.max_n, ge=1)
    """Maximum number of choices in one request: prompts multiplied by n. If they are more than the engine takes at
    once, they share three quarters of its places, and others find the rest free.
    """
    max_messages: int = Field(Limits.max_messages, ge=1, le=MAX_MESSAGES)
    """Maximum number of messages in a chat. MAX_BODY_VALUES bounds them, too."""
    max_tools: int = Field(Limits.max_tools, ge=0)
    """Maximum number of tools in a chat. The schema of each is bounded as other schemas are."""
    max_tokenize_tokens: int = Field(Limits.max_tokenize_tokens, ge=0)
    """Maximum number of tokens that /tokenize returns and /detokenize takes; 0 takes four times the context length."""
    max_stop: int = Field(Limits.max_stop, ge=0)
    """Maximum number of stop strings."""
    max_logit_bias: int = Field(Limits.max_logit_bias, ge=0)
    """Maximum number of entries in logit_bias, bad_words and similar fields."""
    max_top_logprobs: int = Field(Limits.max_top_logprobs, ge=0, le=1000)
    """Maximum number of alternatives reported for a token."""
    max_schema_kb: int = Field(Limits.max_schema_kb, ge=1)
    """Maximum size of a JSON schema, regular expression or grammar in KiB."""
    max_schema_depth: int = Field(Limits.max_schema_depth, ge=1)
    """Maximum depth of nested objects in a JSON schema."""
    guide_timeout_seconds: float = Field(EMBEDDED.guide_timeout_seconds, gt=0)
    """Seconds that compiling a schema, regular expression or grammar may take."""
    guide_workers: int = Field(EMBEDDED.guide_workers, ge=1)
    """Number of processes that compile schemas and regular expressions, and again as many at most for EBNF grammars."""
    chat_template_kwargs: Names = (
        "enable_thinking",
        "thinking",
        "reasoning_effort",
        "documents",
        "custom_instructions",
    )
    """Comma-separated template variables that requests may set."""
    special_tokens_in_content: Literal["text", "allow", "refuse"] = Limits.special_tokens_in_content
    """Treatment of special tokens in messages, such as <|im_start|>: text, tokens (allow) or an error (refuse)."""
    strict_fields: bool = False
    """Refuse unknown request fields with 400 instead of ignoring them."""
    model_optional: bool = False
    """Answer requests that name no model, instead of refusing them with 400."""
