"""Two engine cores that serve requests together, one prefilling and one decoding.

Transfers end when a test says so.
"""

import ctypes
import time
from collections import abc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.handoff.remote_source import resume
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.kit import handoff
from engine.transfer.base import Offer, Read, Region, TransferError
from engine.transfer.transfers import Transfers
from engine.types import Delta, GenerateRequest, Handoff, SamplingParams, is_early

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "kv_cache_memory_mb": 16,
    "kv_transfer": "tcp",
    "overlap_scheduler": "off",
}
Deltas = dict[str, list[Delta]]


def request_of(name: str, prompt: abc.Sequence[int], **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **sampling})
    return GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=params)


def sequence_of(core: EngineCore, request: GenerateRequest) -> Sequence:
    params, prompt = request.sampling, request.prompt_token_ids
    state = SamplerState(
        params, prompt, core.runner.eos_token_ids, params.seed or 0, None, core.runner.vocab_size, core.runner.device
    )
    logprobs = None if params.prompt_logprobs is None else [None]
    sequence = Sequence(
        request=request, sampler=state, rank=0.0, arrival=0.0, tokens=list(prompt), prompt_logprobs=logprobs
    )
    if request.handoff is not None:
        resume(sequence, request.handoff, core.layout)
    return sequence


def step(core: EngineCore) -> list[tuple[str, Delta]]:
    outputs: list[tuple[str, Delta]] = []
    for name, delta in core.step():
        assert isinstance(delta, Delta), delta.__cause__
        outputs.append((name, delta))
    core.scheduler.audit()
    return outputs


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def said(handed: Handoff, deltas: list[Delta]) -> list[int]:
    """Return the whole output: the first token, and those of the decode core."""
    return [*handed.first.token_ids, *tokens(deltas)]


class Pair:
    """A prefill and a decode core of the same model."""

    def __init__(self, folder: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        self.events: list[Any] = []
        self.prefill = EngineCore(EmbeddedConfig(**{"model": str(folder), **OPTIONS, **prefill}), lambda _: None)
        self.decode = EngineCore(EmbeddedConfig(**{"model": str(folder), **OPTIONS, **decode}), self.events.append)
        self.controlled: list[Controlled] = []
        self.early: set[str] = set()
        """Requests that the decode core has begun with early handoffs."""
        self.handoffs: list[tuple[str, Handoff]] = []
        """The handoffs that the decode core has taken."""

    @property
    def transfers(self) -> tuple[int, int]:
        """The numbers of transfers that succeeded and that failed in the decode core."""
        stats = self.decode.stats()
        return stats.kv_transfer_success_total, stats.kv_transfer_failure_total

    def serve(self, requests: list[GenerateRequest], *, early: bool = False) -> Deltas:
        """Serve all requests at once.

        Each is prefilled, handed over, early too if this is wanted, and released as soon as its decode has generated
        something.
        """
        deltas: Deltas = {}
        for request in requests:
            self.prefill.add(sequence_of(self.prefill, replace(request, prefill_only=True, early_handoff=early)))
        by_name = {request.request_id: request for request in requests}
        while self.prefill.busy or self.decode.busy:
            for name, delta in step(self.prefill):
                if not is_early(delta):
                    deltas[name] = [replace(delta, held=None)]
                if delta.finish_reason is None:
                    self.take(by_name[name], travelled(delta))
                else:
                    self.decode.abort(name)
            for name, delta in step(self.decode):
                deltas[name].append(delta)
                self.prefill.abort(name)
        return deltas

    def take(self, request: GenerateRequest, handed: Handoff) -> None:
        """Have the decode core take a handoff of a request, which may be early or follow early ones."""
        name = request.request_id
        if not handed.state:
            self.early.discard(name)
            self.decode.abort(name)
        elif name in self.early:
            self.decode.continue_handoff(name, handed)
        else:
            self.decode.add(sequence_of(self.decode, replace(request, handoff=handed)))
        if handed.state and handed.early:
            self.early.add(name)
        self.handoffs.append((name, handed))

    def hand_over(self, request: GenerateRequest) -> Handoff:
        """What the prefill core, with nothing else to do, leaves of a request; its blocks stay held."""
        self.prefill.add(sequence_of(self.prefill, replace(request, prefill_only=True)))
        while not (outputs := step(self.prefill)):
            pass
        [(_, delta)] = outputs
        assert delta.held is not None and not self.prefill.busy
        return travelled(delta)

    def begin(self, request: GenerateRequest) -> Handoff:
        """Hand a request over, and have the decode core take it."""
        handed = self.hand_over(request)
        self.decode.add(sequence_of(self.decode, replace(request, handoff=handed)))
        return handed

    def finish(self) -> Deltas:
        """What the decode core has still to say, and everything released."""
        deltas: Deltas = {}
        while self.decode.busy:
            for name, delta in step(self.decode):
                deltas.setdefault(name, []).append(delta)
        for sequence in list(self.prefill.scheduler.held):
            self.prefill.abort(sequence.request.request_id)
        return deltas

    def control(self, draw: "Callable[[], Fate] | None" = None) -> None:
        """Have the decode core's transfers wait for the test. Or let `draw` decide how the last one of each sequence
        ends, which a device follows, while all others succeed at once."""
        remote = self.decode.remote
        assert remote is not None
        remote.transfers = _Controller(remote.transfers, self, draw)  # type: ignore[assignment]

    def check_clean(self) -> None:
        for core in (self.prefill, self.decode):
            core.scheduler.audit()
            stats = core.stats()
            assert stats.kv_cache_stats.used_num_blocks == 0 and not core.busy
            assert (
                stats.num_active_requests,
                stats.num_queued_requests,
                stats.num_held_requests,
                stats.num_held_blocks,
            ) == (0, 0, 0, 0)


@contextmanager
def pair_of(
    folder: Path, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> Iterator[Pair]:
    """Nothing may be left held or running at the end."""
    pair = Pair(folder, prefill or {}, decode or prefill or {})
    try:
        yield pair
        pair.check_clean()
    finally:
        pair.prefill.close()
        pair.decode.close()


def travelled(delta: Delta) -> Handoff:
    return handoff.decode_handoff(handoff.encode(handoff.handoff_of("embedded", delta)))


class Controlled:
    """A transfer that does what the test says."""

    def __init__(
        self, real: Transfers, regions: list[Region], offers: abc.Sequence[Offer], reads: abc.Sequence[Read]
    ) -> None:
        self._real = real
        self._regions = regions
        self._offers = offers
        self.reads = reads
        self.cancelled = self.ended = False
        self.error = ""
        self.future: Future[None] = Future()
        self.seconds = 0.001
        self.at_end: Callable[[], None] = lambda: None
        """Called once, by the first `wait` or `done` that finds it ended."""
        self.patience = 0
        """How often `done` says no although it has ended, unless somebody waits."""

    def done(self) -> bool:
        self.patience -= 1
        if self.patience >= 0:
            return False
        self._finish()
        if self.error:
            raise TransferError(self.error)
        return self.ended

    def wait(self) -> None:
        assert self.ended
        self.patience = 0
        self._finish()

    def _finish(self) -> None:
        at_end, self.at_end = self.at_end, lambda: None
        at_end()

    def cancel(self) -> None:
        self.cancelled = True

    def succeed(self) -> None:
        self.copy()
        self.ended = True

    def copy(self) -> None:
        transfer = self._real.read(self._offers, self.reads)
        while not transfer.done():
            time.sleep(0.0005)

    def scribble(self) -> None:
        """Write what is no key and no value to where the bytes should go."""
        for read in self.reads:
            ctypes.memset(self._regions[read.region].address + read.local_offset, 0x41, read.size)


class Fate(NamedTuple):
    """The fate of copies that were queued on a device. `write` puts bytes in place, right or wrong: at once, or at the
    end if they are `late`. The end is seen by whoever waits, or by the fourth call of `done`."""

    write: Callable[[Controlled], None]
    error: str = ""
    late: bool = False

    def befall(self, transfer: Controlled) -> None:
        if self.late:
            transfer.at_end = lambda: self.write(transfer)
        else:
            self.write(transfer)
        transfer.ended, transfer.error, transfer.patience = True, self.error, 3


class _Controller:
    def __init__(self, real: Transfers, pair: Pair, draw: "Callable[[], Fate] | None") -> None:
        self._real = real
        self._draw = draw
        self._pair = pair
        assert pair.decode.remote is not None
        self._regions = [*pair.decode.runner.memory.regions, pair.decode.remote.words.region]

    def offers(self) -> tuple[Offer, ...]:
        return self._real.offers()

    def queue(self, offers: abc.Sequence[Offer], reads: abc.Sequence[Read]) -> Controlled | None:
        """With fates, the end of every reading is queued."""
        if self._draw is None or not any(read.region == len(self._regions) - 1 for read in reads):
            return None
        controlled = Controlled(self._real, self._regions, offers, reads)
        self._pair.controlled.append(controlled)
        self._draw().befall(controlled)
        return controlled

    def read(self, offers: abc.Sequence[Offer], reads: abc.Sequence[Read]) -> Controlled:
        controlled = Controlled(self._real, self._regions, offers, reads)
        self._pair.controlled.append(controlled)
        if self._draw is not None:
            controlled.succeed()
        return controlled

    def close(self) -> None:
        self._real.close()
