"""The seams for keys and values of a prompt that are read instead of computed: `Source`, the `Reading` of some blocks
from one, and `Offload`, which keeps blocks for later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.embedded.sequence import Sequence


class Reading(Protocol):
    """Blocks that are being read into a sequence's tables. Nothing here waits, unless asked to."""

    num_bytes: int
    seconds: float
    """For which something was copied, where `Source.is_transfer`."""

    @property
    def waits(self) -> bool:
        """Whether nothing is copied, since what comes next has yet to be computed elsewhere."""
        ...

    def done(self) -> bool:
        """Return whether all blocks have arrived. Raises TransferError if they never will.

        Once this has returned True or raised, nothing is written to the blocks any more; or the last copies are under
        way, and the device waits for them before it computes anything else.
        """
        ...

    def confirmed(self, *, wait: bool = False) -> bool:
        """Return whether the blocks are known to be what was offered, once `done` has returned True; with `wait`, wait
        until nothing is written to them any more, when that is known.

        Raises TransferError if they are not: whatever was computed from them is wrong.
        """
        ...

    def cancel(self) -> None:
        """Give the reading up. Its blocks may still be written to until `done` returns True or raises."""
        ...


class Source(Protocol):
    """A place that has keys and values of prompts: another replica, memory of the host, a disk. Owned by the engine's
    thread.

    The scheduler asks for an offer when it could admit a sequence. If blocks of the offer are not in the pools already,
    it gives the sequence blocks for all of the offer, and the missing ones are read while the sequence is FETCHING.
    Then it runs from the end of the offer. If the reading fails or takes too long, the sequence is queued again and its
    prompt is computed here, unless it has another offer.
    """

    is_transfer: bool
    """Whether its readings count as transfers between replicas."""

    def offer(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a waiting sequence should be read from here, 0 for none.

        Always less than its tokens, since one has to be computed for its logits. A source that keeps blocks by their
        keys looks up `sequence.extend_keys(block_size)`, and offers whole blocks. Must be cheap and change no other
        answer: it is asked again and again.
        """
        ...

    def read(self, sequence: Sequence, missing: list[list[int]]) -> Reading:
        """Start to read blocks of the offer into the sequence's tables; `missing` has their indices in the table of
        each group of layers.

        Raises TransferError if that cannot be started; the blocks are untouched then.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Drop what is kept for the sequence: it has read the offer, failed to, or does not need it any more. May be
        called in any state.

        A reading that goes on after that keeps what it needs itself. A source whose reading failed must not repeat that
        offer.
        """
        ...


class Offload(Protocol):
    """A place that keeps computed blocks, so that a `Source` has them when the device does not. Nothing here waits."""

    def admitted(self, sequence: Sequence) -> None:
        """A sequence runs from now on; its first `sequence.stored` blocks are computed."""
        ...

    def offload(self, sequence: Sequence, start: int, stop: int, *, always: bool = False) -> None:
        """The blocks from index `start` to `stop` of a sequence's tables are computed; with `always` they are about to
        be given up, and will be needed again."""
        ...
