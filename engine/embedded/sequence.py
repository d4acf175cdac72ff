"""One request inside the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from engine.embedded.kv.blocks import BlockKey, block_key, root_key
from engine.media import MmKeys, mm_keys_of, overlaps_of
from engine.types import FinishReason, GenerateRequest, TokenLogprobs

if TYPE_CHECKING:
    from engine.embedded.handoff.state import HeldState
    from engine.embedded.models.embeddings import PromptImages
    from engine.embedded.sampling.state import SamplerState


class SequenceStatus(Enum):
    """Status of a sequence. Only the scheduler changes it.

    WAITING -> RUNNING -> FINISHED is the usual way. A waiting sequence whose prompt can be read from elsewhere is
    FETCHING before it runs; a running one is WAITING again when it is preempted; one whose prompt was computed for
    another replica is HELD until that has read it.
    """

    WAITING = "waiting"
    """Queued: it has neither a slot nor blocks."""
    FETCHING = "fetching"
    """It has a slot and blocks, into which a source writes keys and values of its prompt."""
    RUNNING = "running"
    """It has a slot and blocks, and takes part in steps."""
    HELD = "held"
    """It has blocks, which another replica may read, and no slot."""
    FINISHED = "finished"
    """Ended or aborted: it has nothing."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Its tokens, and how many of them have keys and values in its blocks.

    `tokens` is the prompt and the output so far. A step computes tokens[computed : computed + n]; when that reaches the
    end, the next token is sampled, and is *pending* until the host has it. Preemption drops `tables` and sets
    `computed` back; the tokens and the sampler's state stay, so the output does not change.
    """

    request: GenerateRequest
    sampler: SamplerState
    rank: float
    """Order of service, smaller first (`GenerateRequest.rank`)."""
    arrival: float
    """`time.monotonic()` at submission."""
    tokens: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    pending: int = 0
    """Tokens that were sampled and that the host has not seen yet: none, unless the next step is prepared ahead."""
    computed: int = 0
    """Number of tokens with keys and values, the step under way included."""
    tables: list[list[int]] = field(default_factory=list)
    """Its blocks in each group of layers, by their index (`engine/embedded/kv/groups.py`); empty while it waits."""
    slot: int = -1
    """Its number among the running sequences, for what a model runner keeps of each; -1 without one."""
    admission: int = 0
    """Number of its last admission, unique in the engine: what was launched before a preemption does not count
    afterwards."""
    void: int = -1
    """The admission of which nothing counts, since it computed from blocks that were not what another replica had
    offered."""
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the full blocks of `tokens`, as far as `extend_keys` has been asked."""
    mm_keys: dict[BlockKey, MmKeys] = field(default_factory=dict)
    """Images of the blocks of `keys` that contain any, as KV events report them."""
    images: PromptImages | None = None
    """The prompt's images; None without any."""
    stored: int = 0
    """Leading blocks that are in the pool's prefix index, or were when they were computed."""
    here: int = 0
    """Leading blocks that are to become reusable, of a sequence of which some were read (`store_fetched`)."""
    cached_tokens: int = 0
    lacks_grammar: bool = False
    """Whether its guide is still being compiled: all but the last token of its prompt may be computed."""
    first_scheduled: float | None = None
    remote: HeldState | None = None
    """Blocks of its prompt on another replica, until they have been read or could not be."""
    lacks_first: bool = False
    """Whether another replica is still computing its prompt, and so its first token, which is pending."""
    readable: int = 0
    """Number of leading tokens whose blocks can be read meanwhile."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    draft: list[int] = field(default_factory=list)
    """Tokens that may come next, to be computed behind the last one in the next step
    (`engine/embedded/speculation/`)."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were computed, and those of them that were right."""
    reported: bool = False
    """Whether the prompt report has been sent."""

    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Number of tokens, pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def spent(self) -> bool:
        """Whether the pending token is the last one that is computed here."""
        if not self.pending:
            return False
        last = 1 if self.request.prefill_only else self.request.sampling.max_tokens
        return len(self.tokens) - self.num_prompt + self.pending >= last

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still have to be reported."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def take(
        self, sampled: tuple[int, ...], eos_token_ids: tuple[int, ...], context_length: int
    ) -> tuple[int, FinishReason | None, int | None]:
        """Append sampled tokens to the output, up to the one that ends it or has the sampler fail
        (`SamplerState.error`).

        Returns how many were taken, and the finish and stop reason if the last of them ended the output.
        """
        sampling, sampler = self.request.sampling, self.sampler
        if sampling.max_tokens == 0:
            return 0, "length", None
        taken = 0
        for token in sampled:
            if taken and sampler.error:
                break
            self.tokens.append(token)
            sampler.accept(token)
            taken += 1
            length = len(self.tokens)
            count = length - self.num_prompt
            if count > sampling.min_tokens:
                if token in sampling.stop_token_ids:
                    return taken, "stop", token
                # A grammar allows the end of sequence only when the output is complete: nothing could follow it.
                if token in eos_token_ids and (sampling.guide is not None or not sampling.ignore_eos):
                    return taken, "stop", None
            if count >= sampling.max_tokens or length >= context_length:
                return taken, "length", None
        return taken, None, None

    def extend_keys(self, block_size: int) -> list[BlockKey]:
        """Return the keys of all full blocks of `tokens`."""
        spans = self.request.spans
        while (start := len(self.keys) * block_size) + block_size <= len(self.tokens):
            parent = self.keys[-1] if self.keys else root_key(self.request.cache_salt)
            overlaps = overlaps_of(spans, start, block_size) if spans else ()
            key = block_key(parent, self.tokens[start : start + block_size], overlaps)
            self.keys.append(key)
            if overlaps:
                self.mm_keys[key] = mm_keys_of(overlaps)
        return self.keys
