"""One request inside the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.embedded.kv.blocks import BlockKey, block_key, root_key
from engine.kit.spans import MmKeys, mm_keys_of, overlaps_of
from engine.types import GenerateRequest, TokenLogprobs

if TYPE_CHECKING:
    from engine.embedded.handoff.leases import Lease
    from engine.embedded.handoff.state import HeldState
    from engine.embedded.models.embeddings import PromptImages
    from engine.embedded.sampling.sampler import SamplerState


@dataclass(eq=False, slots=True)
class Sequence:
    """Its tokens, and how many of them have keys and values in its blocks.

    `tokens` is the prompt and the output so far. A step computes tokens[computed : computed + n]; when that reaches the end, one more
    token is sampled, and is *pending* until the host has it. Preemption drops `tables` and sets `computed` back; the tokens and the
    sampler's state stay, so the output does not change.
    """

    request: GenerateRequest
    sampler: SamplerState
    rank: float
    """Order of service, smaller first (`engine/kit/priority.py`)."""
    arrival: float
    """`time.monotonic()` at submission."""
    tokens: list[int]
    pending: int = 0
    """Tokens that were sampled and that the host has not seen yet: 0, or 1 while the next step is prepared ahead."""
    computed: int = 0
    """How many tokens have keys and values, the step under way included."""
    tables: list[list[int]] = field(default_factory=list)
    """Its blocks in each group of layers, by their index (`engine/embedded/kv/groups.py`); none while it waits."""
    slot: int = -1
    """Its number among the running sequences, for what a model keeps of each; -1 while it waits."""
    starts: int = 0
    """How often it was admitted: what was launched before a preemption does not count afterwards."""
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the full blocks of `tokens`, as far as `extend_keys` has been asked."""
    mm_keys: dict[BlockKey, MmKeys] = field(default_factory=dict)
    """Of those among `keys` whose blocks have images, what KV events say of these."""
    images: PromptImages | None = None
    """The prompt's images; None without any."""
    stored: int = 0
    """Leading blocks that are in the pool's prefix index, or were when they were computed."""
    cached_tokens: int = 0
    first_scheduled: float | None = None
    remote: HeldState | None = None
    """Where another replica keeps the keys and values of its prompt, until they have been read or could not be."""
    lease: Lease | None = None
    """By which its blocks are held for another replica."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reported: bool = False
    """Whether the prompt report has been given out."""

    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)

    @property
    def blocks(self) -> list[int]:
        """Its blocks in the first group: all of them where attention is full in every layer."""
        return self.tables[0]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens, a pending one included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled; 1 while decoding."""
        return self.length - self.computed

    @property
    def spent(self) -> bool:
        """Whether the pending token is the last one that is computed here."""
        last = 1 if self.request.prefill_only else self.request.sampling.max_tokens
        return self.pending > 0 and self.num_output + self.pending >= last

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still have to be reported."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def extend_keys(self, block_size: int) -> list[BlockKey]:
        """Keys of all full blocks of `tokens`."""
        while (start := len(self.keys) * block_size) + block_size <= len(self.tokens):
            parent = self.keys[-1] if self.keys else root_key(self.request.cache_salt)
            overlaps = overlaps_of(self.request.spans, start, block_size)
            key = block_key(parent, self.tokens[start : start + block_size], overlaps)
            self.keys.append(key)
            if overlaps:
                self.mm_keys[key] = mm_keys_of(overlaps)
        return self.keys
