"""The values that cross the engine seam: token ids and numbers, frozen, and free of HTTP, OpenAI and tokenizers.

They are `msgspec` structs, so the same definitions travel between processes as msgpack (`engine/process/host`,
`engine/process/client`).
"""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from engine.media import MediaFiles, MediaSpan, MediaSpans, PromptMedia, Speech, attach_media
from engine.transfer.shared_bytes import Data

FinishReason = Literal["stop", "length"]
GuideKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
GUIDE_KINDS: tuple[GuideKind, ...] = get_args(GuideKind)
CANARY_SALT = "trellis-health-check"
"""Cache salt of the requests that a replica sends to itself: no other request reuses their KV blocks, and they keep no
engine awake."""
PRIORITY_SECONDS = 10.0
"""Seconds of arrival time that one unit of priority is worth, so that a low-priority request waits longer, but not
forever."""


class Guide(msgspec.Struct, frozen=True):
    """A grammar that the output must follow.

    `spec` is the JSON schema, the regular expression, the EBNF grammar, the JSON array of choices, or xgrammar's
    structural tag as JSON; empty for `json_object`.
    """

    kind: GuideKind
    spec: str = ""


class ReasoningBudget(msgspec.Struct, frozen=True, omit_defaults=True):
    """A limit on the tokens generated inside reasoning, of which the engine knows where it begins and ends.

    `engine/kit/reasoning.py` follows it, `multimodal/answers/budgets.py` makes it. Each state of the output has a
    number, 0 outside of reasoning and 1 inside at first; odd ones are inside.
    """

    tokens: int
    close: tuple[int, ...]
    """Ids that are forced when the budget is spent inside reasoning; they end it."""
    avoid: tuple[int, ...] = ()
    """Ids that are forbidden right after `close`, because they would begin reasoning again."""
    inside: bool = False
    """Whether the output begins inside reasoning."""
    steps: dict[int, dict[int, int]] = {}
    """The next state, by state and id. An id that a state does not list has the same next state as from state 0 or
    1."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping of one sequence.

    Validated at the edge; the engine asserts, it does not repeat the checks.
    """

    max_tokens: int
    """With 0 the engine only reports on the prompt: one delta without tokens."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, multiplicative (CTRL); 1 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency count output tokens only, as OpenAI documents."""
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that never complete in the output."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens, whatever else is in the batch and after a restart."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence in addition to the model's end-of-sequence ids."""
    logprobs: int | None = None
    """Number of alternatives reported for each token; None is off, 0 reports the sampled token alone."""
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    processors: tuple[str, ...] = ()
    """Names of registered logits processors (`engine/kit/logits.py`), applied in order."""
    reasoning_budget: ReasoningBudget | None = None


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token before temperature, penalties and masks; `rank` 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


TokenLogprobs = tuple[Logprob, ...]
"""Log-probabilities at one position: the sampled (or prompt) token first, then the top alternatives in order of rank.
The sampled token appears again among the alternatives when it is one of them."""


class PromptReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine's report on the prompt, sent once, with the first delta."""

    prompt_tokens: int = 0
    """Length of the prompt as the backend expanded it; 0 if it is the request's own."""
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    """Seconds from receipt of the request until its first token was scheduled."""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry for each prompt token, the first None; only when asked for."""
    no_speech: float | None = None
    """Probability that the window has no speech, from a model that transcribes."""
    spoken: tuple[float, ...] = ()
    """Seconds of the window at which each prompt token between <|notimestamps|> and the last begins to be spoken, and
    the last of them ends, if `Speech.align` asks for it."""


class Held(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt's KV blocks, kept for another replica to read."""

    state: bytes
    """Location of the blocks, in the backend's own format."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt as the backend expanded it, with its images' tokens; empty if it is the request's own."""
    computed: int = 0
    """Number of leading tokens whose blocks can be read, before the first token is there; then all can."""


class Performance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times and counts of one request as the backend measured them; 0 means unknown or none."""

    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    """Mean time between a token and the next."""
    seconds: float = 0.0
    """Seconds from the request's arrival in the engine to its last token."""
    transfer_seconds: float = 0.0
    transfer_bytes: int = 0
    """KV blocks that were read from another replica."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Number of tokens that speculation drafted, and of those that the model accepted."""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request.

    The first carries `prompt`; the last, and only the last, carries `finish_reason`, or `held`. The token that ended
    the sequence (end of sequence or a stop token id) is the last of `token_ids`, and `stop_reason` is its id if it came
    from `stop_token_ids`, else None. `logprobs` has one entry for each token when asked for, else it is empty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    prompt: PromptReport | None = None
    held: Held | None = None
    """Set for a `prefill_only` request that its first token did not end: its KV blocks wait to be read. A delta without
    tokens is early (`GenerateRequest.early_handoff`): an empty `state` takes back those before."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Number of tokens that speculation drafted for this delta, and of those that are in it."""
    performance: Performance | None = None
    """Timing of the request, in its last delta, if the backend measures it."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a started engine. Capacity is what the engine really has, never what a setting asked for."""

    backend: str
    model: str
    """Folder of the model."""
    dtype: str
    """Type in which the model computes, as far as the backend can say."""
    device: str
    context_length: int
    """Maximum number of tokens, prompt and output together, that one sequence may hold."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    """Tokens in a KV block."""
    num_blocks: int
    max_num_seqs: int
    """Maximum number of sequences in one step."""
    max_num_tokens: int
    """Maximum number of tokens in one step."""
    tensor_parallel_size: int = 1
    """Ranks among which each layer's KV heads are divided."""
    data_parallel_size: int = 1
    """Ranks that each attend to sequences of their own, with a KV cache of their own; the capacity above is that of one
    rank."""
    load_seconds: float = 0.0
    kv_bytes: int = 0
    """Memory of the KV blocks; 0 where the backend cannot say."""
    host_kv_bytes: int = 0
    """Memory of the host for KV blocks that the device has no room for."""
    disk_kv_bytes: int = 0
    """Disk space for KV blocks that the host has no room for."""
    threads: int = 0
    """Compute threads on a CPU; 0 on other devices."""
    compute_path: str = ""
    """Code that computes a step of the embedded engine: `native`, `cuda` or `transformers`."""
    instruction_set: str = ""
    """Instruction set of that code: a level of CPU_ISA, or torch's name for its own on a CPU (avx2, avx512 …) and a GPU
    (sm_90)."""
    shared_weight_bytes: int = 0
    """Weights that the memory service owns and other engines may map too."""
    own_weights: str = ""
    """Reason why this engine keeps weights of its own though it has a memory service; empty if it does not, or has
    none."""
    quantization: str = ""
    """Quantisation of the embedded engine's weights: fp8 or int8; empty for none."""
    guides: tuple[GuideKind, ...] = ()
    """Kinds of guided decoding this engine can do."""
    text_grammars: bool = False
    """Whether structural tags may have the format `text_grammar` (`engine/embedded/grammar/with_xgrammar.py`)."""
    refused_parameters: tuple[tuple[str, str], ...] = ()
    """Fields of `SamplingParams` that this engine refuses, always or under conditions, each with the reason."""
    max_logprobs: int = 20
    capacity: int = 0
    """Maximum number of tokens that one sequence's KV blocks can hold, if that is less than `context_length`; 0 if it
    is not."""
    kv_layout: str = ""
    """One line that is the same for engines that can use each other's KV blocks; empty where the backend cannot say."""
    max_encoded_images: int = 0
    """Maximum number of images of a prompt that other replicas can encode, for a backend that encodes images itself; 0
    is any number."""
    prompt_logprobs: bool = True
    """Whether this engine has log-probabilities of prompts; it refuses a request for them otherwise."""
    handoff_logprobs: bool = True
    """Whether this engine has log-probabilities after a handoff. If not, requests for them must not be prefilled
    elsewhere."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A computed prompt that a prefill replica passes to decode (`engine/kit/handoff.py` has the codec). It is valid
    while the prefill's stream is open.
    """

    version: int
    backend: str
    """Kind of the engine that computed the blocks: only one of the same kind can continue."""
    first: Delta
    """The first token, with its log-probabilities and the report on the prompt. With a `finish_reason` there is nothing
    to decode. Without either the handoff is early."""
    state: bytes = b""
    """Location of the KV blocks, in the backend's own format; empty if they are lost: the engine then computes the
    prompt itself."""
    computed: int = 0
    """Number of leading tokens whose blocks can be read, if the handoff is early."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt as the backend expanded it, with its images' tokens; empty if it is the request's own."""
    lease: bytes = b""
    """Location of the lease on the KV blocks, in the format of the transport of the handoff; empty if the answer that
    brought it is the lease."""

    @property
    def early(self) -> bool:
        """Whether the prompt is still being computed; another handoff with the first token follows."""
        return is_early(self.first)


def is_early(delta: Delta) -> bool:
    """Return whether a delta of a `prefill_only` request comes before its first token."""
    return not delta.token_ids and delta.finish_reason is None


class NextHandoff(msgspec.Struct, frozen=True):
    """A later handoff for a request that was begun with an early one."""

    request_id: str
    handoff: Handoff


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate: n choices and lists of prompts are several requests.

    `priority`: lower is served first, ties by arrival. `cache_salt`: only requests with an equal salt share KV blocks.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    group: str = ""
    """Equal for all sequences of one client's request; empty if there is only one."""
    group_size: int = 1
    """Number of sequences of the group."""
    priority: int = 0
    cache_salt: str = ""
    skip_save: bool = False
    """Do not copy the KV blocks of this request to the host or the disk."""
    media: PromptMedia | None = None
    """The prompt's images: encoded, as files for the backend to encode, or encoded elsewhere in the backend's own
    terms. For a model that transcribes, the speech."""
    handoff: Handoff | None = None
    """Continue from this handoff: the deltas are those after `handoff.first`, without a report on the prompt. After an
    early one the blocks are read as they are computed, and `Engine.continue_handoff` brings the first token."""
    prefill_only: bool = False
    """Compute the prompt and one token. If that does not end the request, its delta carries `held` and the stream stays
    open, idle: the KV blocks are held until it is closed."""
    early_handoff: bool = False
    """With `prefill_only`: say in deltas without tokens which blocks can be read while the prompt is computed, if the
    backend can."""
    prediction: tuple[int, ...] = ()
    """Predicted output: speculation proposes its tokens."""
    dp_rank: int | None = None
    """Data-parallel rank whose KV cache has most of the prompt, as a router knows it; None leaves the choice to the
    replica."""
    trace: dict[str, str] = {}
    """W3C trace context (`traceparent`, `tracestate`) of the request, for a backend that traces by itself."""

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        """The media whose embeddings come with the request; none where the backend encodes."""
        return self.media.spans if isinstance(self.media, MediaSpans) else ()

    @property
    def has_remote(self) -> bool:
        """Whether embeddings of its media stayed with their encoder."""
        return any(span.remote is not None for span in self.spans)

    def rank(self, arrival: float) -> float:
        """Return a sort key for queues, smallest first: the arrival in seconds, shifted by the priority."""
        return arrival + self.priority * PRIORITY_SECONDS

    def media_data(self) -> list[Data]:
        """Return the bytes of the media's embeddings, or of their files, in order."""
        match self.media:
            case MediaSpans(spans):
                return [span.data for span in spans]
            case MediaFiles(_, files):
                return [file.data for file in files]
            case Speech():
                return [self.media.data]
        return []

    def detach(self) -> "tuple[GenerateRequest, list[Data]]":
        """Return the request without the bytes of its media, and the bytes, which travel beside it uncopied."""
        parts = self.media_data()
        return self.attach([b""] * len(parts)), parts

    def attach(self, parts: Sequence[Data]) -> "GenerateRequest":
        """Put back together what `detach` took apart. Raises ValueError unless there is one part for each medium."""
        match self.media:
            case MediaSpans(spans):
                found = tuple(replace(span, data=data) for span, data in zip(spans, parts, strict=True))
                return replace(self, media=MediaSpans(found))
            case MediaFiles(text, files):
                return replace(self, media=MediaFiles(text, tuple(attach_media(files, parts))))
            case Speech():
                (data,) = parts
                return replace(self, media=replace(self.media, data=data))
        if parts:
            raise ValueError(f"{len(parts)} parts belong to no medium")
        return self
