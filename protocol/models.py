"""GET /v1/models, /server_info and /version."""

from typing import Any, Literal

from pydantic import BaseModel


class Peers(BaseModel):
    """Replicas that this one asks: how many it knows, and how many of them answer."""

    known: int
    available: int


class Runtime(BaseModel):
    """How a replica runs. Facts of the engine are null where there is none, and before it has started."""

    role: str
    backend: str | None
    device: str | None = None
    dtype: str | None = None
    """Type in which the model computes."""
    compute_path: str | None = None
    """Code of the embedded engine that computes: native, cuda or transformers."""
    instruction_set: str | None = None
    """Which that path uses: portable, avx2, avx512, or a GPU's compute capability."""
    context_length: int | None = None
    kv_block_size: int | None = None
    """Tokens in a KV block."""
    total_kv_blocks: int | None = None
    """For each data-parallel rank, as are the two that follow."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    guides: list[str] = []
    """Kinds of guided decoding."""
    parsers: list[str] = []
    """Parsers of tool calls and reasoning; there are none yet."""
    peers: dict[str, Peers]
    kv_events_port: int | None
    """Port of the first data-parallel rank's KV-cache events; the other ranks' ports follow. Null if not published."""
    kv_events_replay_port: int | None
    versions: dict[str, str]


class Model(BaseModel):
    """A served model; `max_model_len` is its context length in tokens. `runtime` is our extension."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trellis"
    root: str
    max_model_len: int
    runtime: Runtime


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ServerInfo(BaseModel):
    """A replica's runtime configuration and settings."""

    model: str
    ready: bool
    runtime: Runtime
    settings: dict[str, Any]
    """By name; "***" for a secret or an address that is set."""


class Version(BaseModel):
    version: str
