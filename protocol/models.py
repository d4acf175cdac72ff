"""GET /v1/models, /server_info and /version."""

from typing import Any, Literal

from pydantic import BaseModel


class Peers(BaseModel):
    """Replicas that this one asks."""

    known: int
    """Number of known replicas."""
    available: int
    """Number of replicas that answer."""


class Runtime(BaseModel):
    """Runtime configuration of a replica. Facts of the engine are null without an engine, and before it has started."""

    role: str
    """Role of the replica: aggregated, prefill, decode, encode or router."""
    backend: str | None
    """Engine: embedded, trtllm or fake."""
    device: str | None = None
    """Device on which the model runs."""
    dtype: str | None = None
    """Type in which the model computes."""
    compute_path: str | None = None
    """Code of the embedded engine that computes: native, cuda or transformers."""
    instruction_set: str | None = None
    """Instruction set of that path: a level of CPU_ISA, such as avx2, or a GPU's compute capability."""
    quantization: str | None = None
    """Quantisation of the weights: fp8 or int8; null for none."""
    context_length: int | None = None
    """Maximum number of tokens of one sequence, prompt and output together."""
    kv_block_size: int | None = None
    """Tokens in a KV block."""
    total_kv_blocks: int | None = None
    """Number of KV blocks, for each data-parallel rank, as are most sequences and tokens of a step."""
    kv_host_cache_bytes: int | None = None
    """Memory of the host for KV blocks that the device has no room for."""
    kv_disk_cache_bytes: int | None = None
    """Disk space for KV blocks that the host has no room for."""
    max_num_seqs: int | None = None
    """Maximum number of sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Maximum number of tokens in one step."""
    tensor_parallel_size: int | None = None
    """GPUs that share each layer."""
    data_parallel_size: int | None = None
    """Ranks with a KV cache of their own."""
    guides: list[str] = []
    """Kinds of guided decoding."""
    pipeline: str | None = None
    """Class of diffusers that makes pictures or videos; null for a model of text."""
    makes: list[str] = ["text"]
    """Kinds of output: text, image or video."""
    takes: list[str] = []
    """Kinds of input: text, image, video, audio. A model that transcribes takes audio alone."""
    refused_parameters: dict[str, str] = {}
    """Sampling parameters that the engine refuses, always or under conditions, each with the reason."""
    tool_call_parser: str | None = None
    """Parser of tool calls, by TOOL_CALL_PARSER."""
    reasoning_parser: str | None = None
    """Parser of reasoning, by REASONING_PARSER."""
    peers: dict[str, Peers]
    """Replicas that this one asks, by what for."""
    kv_events_port: int | None
    """Port of the first data-parallel rank's KV-cache events; the other ranks' ports follow. Null if not published."""
    kv_events_replay_port: int | None
    """Port that sends missed events again."""
    versions: dict[str, str]
    """Versions of the server and of relevant packages."""


class Model(BaseModel):
    """A served model."""

    id: str
    """Its name in requests."""
    object: Literal["model"] = "model"
    """Kind of this object."""
    created: int
    """Unix time in seconds at which the server was started."""
    owned_by: str = "trellis"
    """Always trellis."""
    root: str
    """The same as `id`."""
    max_model_len: int | None
    """Context length in tokens, as vLLM has it; null for a model of pictures."""
    runtime: Runtime
    """Runtime configuration of the replica, an extension."""


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    """Kind of this object."""
    data: list[Model]
    """One model."""


class ServerInfo(BaseModel):
    """A replica's runtime configuration and settings."""

    model: str
    """Name of the model in requests."""
    ready: bool
    """Whether the replica takes requests now."""
    runtime: Runtime
    """Runtime configuration of the replica."""
    settings: dict[str, Any]
    """Settings by name; "***" for a secret or an address that is set."""


class Version(BaseModel):
    """Version of the server."""

    version: str
    """The version."""
