"""The seam between the engine and the code that computes a step on a device: `ModelRunner` over `StepInput`.

Three runners pass one conformance suite (`tests/engine/embedded/models/test_runner_conformance.py`): `torch/` runs
transformers' own model code on any device, `native/` compiled code on a CPU, `cuda/` kernels and CUDA graphs on an
NVIDIA GPU.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine.checkpoints.eagle import EagleHead
from engine.config import Tag
from engine.embedded.kv.layout import LayerGroup
from engine.embedded.kv.memory import KvMemory
from engine.embedded.models.heads import HeadRunner
from engine.embedded.models.shared_weights import SharedWeights
from engine.embedded.sampling.sampler import Sampler
from engine.kit.checks import ImageTokens


class EmbeddingRows(NamedTuple):
    """Flat rows of a step that take embeddings of images instead of those of their token ids."""

    rows: list[int]
    embeddings: torch.Tensor
    """[rows, hidden size], of the runner's type and on its device."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """The whole description of a step for a model runner, as plain data: some consecutive tokens of some sequences,
    side by side.

    Flat lists have an entry for each token, the others one for each sequence. Sequences of one token, which decodes
    are, come first. Lists may be the scheduler's own: a runner reads them while `forward` runs and does not keep them.
    """

    tokens: list[int]
    """Flat: token ids. -1 - slot names the last token that was sampled for a slot, which the host need not have seen
    (`ModelRunner.remember`)."""
    positions: list[int]
    """Flat: the position of each token in its sequence."""
    starts: Sequence[int]
    """The position of each sequence's first token in this step."""
    lengths: Sequence[int]
    """Number of tokens of each sequence, one at least."""
    slots: Sequence[int]
    """Number of each sequence among the running ones, below the batch size: where a runner keeps what outlives a
    step."""
    admissions: Sequence[int]
    """Changes for a slot when another sequence is admitted to it, or the same one again. Otherwise its tables have
    only grown."""
    tables: Sequence[Sequence[list[int]]]
    """Block table of each sequence in each group of layers: the block of every `block_size` tokens, from the first
    to that of the last token of this step or further. Those behind a sliding window are GONE
    (`engine/embedded/kv/groups.py`)."""
    sampled: Sequence[int]
    """Number of tokens that are sampled for each sequence after this step, of its last rows: 0 in the middle of a
    prompt, several if it has drafted tokens (`engine/embedded/speculation/`)."""
    rows: list[int]
    """Flat rows whose logits are wanted."""
    embeddings: EmbeddingRows | None = None
    """Embeddings of images; None for a step without any, which most are."""
    rope_positions: torch.Tensor | None = None
    """Models with mRoPE: positions in time, height and width, int64 [3, tokens]; None where all three are
    `positions`."""

    @property
    def singles(self) -> int:
        """Number of sequences of one token; they come first."""
        return self.lengths.count(1)


class ModelRunner(Protocol):
    """A loaded model, its KV cache, and the computation of steps over both. Owned by one thread.

    A runner is ready for any step when it has been constructed: it has warmed up, on blocks of its own. Construction
    raises EngineFailure for settings that cannot be served and UnsupportedModelError for a model, or a machine, that
    another runner has to run.

    Keys and values that a step writes are those that later steps read through block tables; a runner knows no sequence
    beyond `slots`. What a sequence's logits are depends on its own tokens alone, up to rounding, whatever else is in
    the step.
    """

    device: torch.device
    dtype: torch.dtype
    """Type of activations, and of embeddings that are passed in."""
    compute_path: str
    """The code that computes, for reports: native, cuda or transformers."""
    instruction_set: str
    """Level of the processor's instructions that is used; empty on a GPU."""
    vocab_size: int
    context_length: int
    """Maximum number of tokens of a sequence."""
    eos_token_ids: tuple[int, ...]
    takes_images: ImageTokens | None
    """The tokens that embeddings of images replace; None if the model takes no images."""
    groups: list[LayerGroup]
    """Layers that share block tables, full attention first, and how many blocks each group has."""
    shared_weights: SharedWeights | None
    """This engine's share in the memory service; None without a service."""
    hidden: torch.Tensor | None
    """Hidden states that entered some layers in the last step, [tokens, layers * hidden size], where
    `SPECULATIVE=eagle3` reads them. On a GPU the next step may overwrite them."""
    memory: KvMemory
    """The KV cache, for those who move blocks. Its first `groups[i].num_blocks` blocks are the scheduler's."""
    graph_tokens: int
    """Number of tokens up to which a step of any kind is a CUDA graph: beside decodes, tokens of a prompt cost little
    in it. 0 without graphs."""

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens of a step for the time being, while kernels for more are being compiled; None
        without such a limit."""
        ...

    @property
    def sampler(self) -> Sampler | None:
        """The runner's own sampler, for the logits of its last step; None for the usual one."""
        ...

    def expect(self, slot: int, admission: int, tables: Sequence[list[int]]) -> None:
        """Prepare for a sequence that a later step will have in this slot, if that helps; arguments as in
        `StepInput`."""

    def forward(self, step: StepInput) -> torch.Tensor:
        """Compute a step and return the logits [len(step.rows), vocab_size] of the rows wanted, on the device.

        Does not wait for the device. The logits may be overwritten by the next call. Raises RuntimeError or ValueError
        if the step fails.
        """
        ...

    def close(self) -> None:
        """Stop background work; no step may follow."""

    def take_memory(self) -> None:
        """Take the memory of KV blocks if only their addresses have been reserved (`kv_memory_later`). Raises
        EngineFailure."""

    def load_head(self, head: EagleHead, spare_blocks: int) -> HeadRunner:
        """Load an EAGLE-3 head for this model, whose KV cache has this many more blocks than `groups[0]`. Raises
        EngineFailure."""
        ...

    def remember(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Keep the tokens, int64 [slots] on the device, that were sampled last for these slots: the next step may
        name them."""
        ...

    def release_memory(self, tags: Collection[Tag], level: int) -> None:
        """Give memory back while nothing is computed, at a level of `engine/sleep.py`. The KV cache keeps its address.
        On a CPU, level 1 keeps weights where they are: in memory of the host. Raises EngineFailure."""
        ...

    def resume_memory(self, tags: Collection[Tag]) -> None:
        """Take released memory again; does nothing for what was not released. The KV cache is zero. Raises
        EngineFailure, and may then be called again."""
        ...


class PendingTokens:
    """The last sampled token of each slot, and the part of `ModelRunner` that has to do with them."""

    sampler: Sampler | None = None
    shared_weights: SharedWeights | None = None
    hidden: torch.Tensor | None = None
    graph_tokens = 0
    most_tokens: int | None = None

    def close(self) -> None:
        """Do nothing: there is no background work."""

    def expect(self, slot: int, admission: int, tables: Sequence[list[int]]) -> None:
        """Do nothing: a step alone is enough."""

    def take_memory(self) -> None:
        """Do nothing: memory was taken, or is taken page by page."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._sampled = torch.zeros(slots, dtype=torch.int64, device=device)

    def remember(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        self._sampled[torch.tensor(slots, device=self._sampled.device)] = tokens

    def token_ids(self, step: StepInput) -> list[int]:
        """Return the flat token ids of a step, pending ones filled in."""
        if min(step.tokens) >= 0:
            return step.tokens
        sampled = self._sampled.tolist()
        return [token if token >= 0 else sampled[-1 - token] for token in step.tokens]
