"""Rounds of a draft by the head and its verification by the target, as CUDA graphs: several of them run before the host
knows what came of the first.

Between a step with drafts and the next one the host takes almost a millisecond, in which the device waits: longer than
a step of a small model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from engine.embedded.models.cuda import round_kernels
from engine.embedded.models.cuda.compiling import expect_compilation, warn_of_compilation
from engine.embedded.models.cuda.graphs import capture
from engine.embedded.models.cuda.head import Chain, CudaHead, parts
from engine.embedded.models.cuda.round_kernels import STATE, RoundTensors
from engine.embedded.models.heads import MOST_ROUNDS, ROUND_DRAFTS, ROUND_TOKENS, HeadStep, RoundStart
from engine.kit.collector import uncollected

_MOST_SEQUENCES = 16
"""Maximum number of sequences: with more, what the host takes is little of a step."""

Compute = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Computes inputs of the target, int32 [4 * rows]; returns the tokens drawn behind each, int64 [rows], and the hidden
states for the head, [rows, any]."""


class _Captured(NamedTuple):
    """Rounds of up to as many sequences as the chain has."""

    chain: Chain
    rounds: RoundTensors
    graph: torch.cuda.CUDAGraph
    host: torch.Tensor
    """Where the host writes what the first round begins with: the state, then two rows of slots, one for the model and
    one for its sampler."""


class CudaRounds:
    """`DraftRounds` of a `CudaHead`."""

    def __init__(self, head: CudaHead, chains: Sequence[Chain], compute: Compute, spare_slot: int) -> None:
        """`chains`: those of the head that run in rounds; `spare_slot`: the slot of padding."""
        self._head, self._compute, self._spare_slot = head, compute, spare_slot
        self._graphs: list[_Captured] = []
        pool: Any = None
        expect_compilation()
        for chain in chains:
            with torch.inference_mode(), uncollected():
                self._graphs.append(self._captured(chain, pool))
            pool = self._graphs[-1].graph.pool()
        warn_of_compilation()
        self.most_sequences = chains[-1].size
        self._ran: list[int] = []
        """Admissions of the sequences of the last rounds."""
        self._drafted: list[tuple[int, int]] = []
        """These and the positions behind which the last round has drafted, if all sequences go on."""

    @classmethod
    def of(cls, head: CudaHead, compute: Compute, most_rows: int, spare_slot: int) -> "CudaRounds | None":
        """Return the rounds of a head whose target computes up to `most_rows` tokens in a graph; None if a sequence has
        more."""
        most = min(min(most_rows, len(head.inputs)) // ROUND_TOKENS, _MOST_SEQUENCES)
        chains = [chain for chain in head.chains if chain.size <= most]
        return cls(head, chains, compute, spare_slot) if chains else None

    def goes_on(self, starts: Sequence[RoundStart]) -> bool:
        """See `DraftRounds`."""
        return (
            self._head.last_draft is self and [(start.admission, start.position) for start in starts] == self._drafted
        )

    @torch.inference_mode()
    def run(self, starts: Sequence[RoundStart], step: HeadStep, rounds: int) -> torch.Tensor:
        """See `DraftRounds`."""
        count = len(starts)
        found = next(graph for graph in self._graphs if graph.chain.size >= count)
        chain, size = found.chain, found.chain.size
        if self.goes_on(starts):
            self._head.set_tables(chain, step.tables, 0)
        else:
            self._head.start(chain, step, ROUND_DRAFTS, 0)
        self._ran, self._drafted, self._head.last_draft = [start.admission for start in starts], [], self
        state, slots = found.host[: STATE * size].view(STATE, size).numpy(), found.host[STATE * size :].view(2, -1)
        state.fill(0)
        state[4] = size  # the table that is spare
        state[0, :count] = [start.position for start in starts]
        state[1, :count] = [start.token for start in starts]
        state[3, :count] = [start.skipped for start in starts]
        state[4, :count] = range(count)
        slots.fill_(self._spare_slot)
        slots.numpy()[:, : count * ROUND_TOKENS] = [start.slot for start in starts for _ in range(ROUND_TOKENS)]
        found.rounds.state.view(-1).copy_(found.host[: STATE * size], non_blocking=True)
        found.rounds.inputs[2:].view(-1).copy_(found.host[STATE * size :], non_blocking=True)
        for _ in range(rounds):
            found.graph.replay()
        return found.rounds.results[:rounds, :count]

    def note_taken(self, starts: Sequence[RoundStart]) -> None:
        """See `DraftRounds`."""
        if [start.admission for start in starts] == self._ran:
            self._drafted = [(start.admission, start.position) for start in starts]

    def _captured(self, chain: Chain, pool: Any) -> _Captured:
        size, device = chain.size, chain.inputs.device
        rows = size * ROUND_TOKENS
        rounds = RoundTensors(
            torch.zeros((STATE, size), dtype=torch.int32, device=device),
            torch.zeros((4, rows), dtype=torch.int32, device=device),
            chain.found,
            torch.zeros((MOST_ROUNDS + 2, size, 1 + ROUND_TOKENS), dtype=torch.int32, device=device),
            ROUND_DRAFTS,
        )
        rounds.state[4] = size
        rounds.inputs[2:] = self._spare_slot
        chain.clear(rows)
        graph, _ = capture(partial(self._round, chain, rounds), pool)
        host = torch.zeros(STATE * size + 2 * rows, dtype=torch.int32)
        return _Captured(chain, rounds, graph, host.pin_memory() if device.type == "cuda" else host)

    def _round(self, chain: Chain, rounds: RoundTensors) -> None:
        """Verify the draft that is there, and make the next one."""
        rows = rounds.inputs.shape[1]
        round_kernels.propose(rounds)
        drawn, hidden = self._compute(rounds.inputs.view(-1), rows)
        ends, reads = parts(chain.inputs, chain.size, rows)
        round_kernels.verify(rounds, drawn, ends, reads)
        self._head.inputs[:rows].copy_(hidden)
        self._head.read(chain, rows)
        for _ in range(ROUND_DRAFTS - 1):
            self._head.follow(chain)
