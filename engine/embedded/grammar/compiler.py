"""Guided decoding: a cache of compiled grammars, and the matcher that follows one sequence through its grammar.

Every grammar is first compiled in a grammar worker, under a time and a memory limit. A grammar that fails there is
refused; one that passes is safe to build here.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine.embedded.grammar.client import WorkerTimeoutError
from engine.embedded.grammar.library import Compiled, Library, LibraryName, Position, Setup, library_of, load
from engine.embedded.grammar.pool import WorkerPool
from engine.errors import EngineNotReady, InvalidRequest
from engine.kit.machine import host_memory
from engine.types import Guide

_LIBRARIES: tuple[LibraryName, ...] = ("llguidance", "xgrammar")
_CACHE_BYTES = 256 << 20
_MAX_REFUSALS = 256
_REFUSAL_SECONDS = 60.0
"""Seconds for which the reason of a failed compilation is remembered."""
_MAX_MESSAGE = 400
_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "structural_tag": "grammar",
}
"""Names of the kinds of guides, where they differ from the kind."""
_PARAM = "guide"
_AMPLE_BYTES = 4 << 30
"""Memory of the machine or container from which on xgrammar is loaded before a request needs it ..."""
_LATER_SECONDS = 10.0
"""... this long after the start."""
# A grammar that compiles may still be slow to follow. Each sequence may spend this much processor time at the start ...
_PATIENCE_SECONDS = 2.0
# ... and this much more with every token.
_TOKEN_SECONDS = 0.02
_MANY = 8
"""Number of masks from which on they are computed together rather than one after the other."""
_SLOW_SECONDS, _SLOW_SECONDS_EACH = 0.005, 5e-5
"""Time for masks that are computed together, and for each more, above which the next `_MASKS_ALONE` of each sequence
are not: one sequence must not use up the others' time unnoticed."""
_MASKS_ALONE = 16
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_MOST = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))
"""The largest value that is left of each of eight logits, by a byte of a bitmask: float32 [256, 8]."""


class Matcher:
    """The position of one sequence in its grammar.

    It may be made before the grammar has been compiled: `begin` hands that in later. Until then the sequence must not
    sample.
    """

    def __init__(self, stop_token_ids: Sequence[int], compiled: Compiled | None = None) -> None:
        self._position: Position | None = None
        self._stops = frozenset(stop_token_ids)
        self._spent = 0.0
        self._alone = 0
        """Masks to compute alone, so that their time is known to be this sequence's."""
        self.allowance = _PATIENCE_SECONDS
        self.finished = False
        """Whether the grammar is complete and an end-of-sequence token was accepted."""
        self.error = ""
        """Reason why the output cannot follow the grammar any further, or not in time; the request must then fail."""
        if compiled is not None:
            self.begin(compiled)

    @property
    def ready(self) -> bool:
        """Whether the grammar is there."""
        return self._position is not None

    def begin(self, compiled: Compiled) -> None:
        """Start at the beginning of a compiled grammar."""
        self._position = compiled.start()

    @property
    def shared(self) -> Position | None:
        """The position, if its mask may be computed together with those of others."""
        if self.finished or self.error or self._alone or self._position is None or self._position.together is None:
            return None
        return self._position

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """Set the bits of the ids that may come next in `row` of int32 [rows, ceil(vocab / 32)], on the CPU."""
        assert self._position is not None
        started = time.thread_time()
        if not self.finished and not self.error:
            self._alone = max(0, self._alone - 1)
            self._position.fill(bitmask.numpy(), row)
        self.filled(bitmask, row, empty=not bitmask.numpy()[row].any())
        self._spend(started)

    def filled(self, bitmask: torch.Tensor, row: int, *, empty: bool, slow: bool = False) -> None:
        """Note that the bits have been set, none if `empty`; `slow`: together with others', one of which took too
        long."""
        assert self._position is not None
        if slow:
            self._alone = _MASKS_ALONE
        if not self.finished and not self.error:
            self.error = self._position.error
            if empty and not self.error:
                self.error = "no token of the model continues the grammar"
        if self.finished or self.error:
            bitmask[row] = 0
            for token_id in self._stops:
                bitmask[row, token_id // 32] |= 1 << token_id % 32 if token_id % 32 < 31 else -(2**31)

    def allows(self, token_id: int) -> bool:
        """Return whether a token may come next, as the bit that `fill` sets for it would say."""
        assert self._position is not None
        if self.finished or self.error:
            return token_id in self._stops
        if token_id in self._stops:
            return self._position.may_end()
        started = time.thread_time()
        allowed = self._position.allows(token_id)
        self._spend(started)
        return allowed

    def accept(self, token_id: int) -> bool:
        """Advance by a token of the output. Return False, and stay, if the grammar does not allow it.

        After the end of the grammar every token is accepted.
        """
        assert self._position is not None
        if self.finished or self.error:
            return True
        if token_id in self._stops:
            self.finished = self._position.may_end()
            return self.finished
        started = time.thread_time()
        accepted = self._position.accept(token_id)
        self.error = self._position.error
        self.allowance += _TOKEN_SECONDS
        self._spend(started)
        return accepted

    def _spend(self, started: float) -> None:
        self._spent += time.thread_time() - started
        if self._spent > self.allowance:
            self.error = self.error or "the grammar is too ambiguous to be followed token by token"


class Filler(Protocol):
    """Sets the bits of the tokens that may come next: a `Matcher`, or one around it."""

    @property
    def shared(self) -> Position | None: ...

    def fill(self, bitmask: torch.Tensor, row: int) -> None: ...

    def filled(self, bitmask: torch.Tensor, row: int, *, empty: bool, slow: bool = False) -> None: ...


class GrammarCompiler:
    """Compiles guides off the event loop and caches the results, up to `_CACHE_BYTES`. For use on one event loop.

    `vocab_size` is the model's, padding included. `timeout` is in seconds, counted from when a worker starts on a
    guide; `workers` is the number of processes for each library.
    """

    def __init__(
        self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: Sequence[int], timeout: float, workers: int = 2
    ) -> None:
        self._tokenizer = tokenizer_folder.resolve() / "tokenizer.json"
        self._stops = tuple(eos_token_ids)
        self._setups = {name: Setup(name, str(self._tokenizer.parent), vocab_size, self._stops) for name in _LIBRARIES}
        self._pools = {name: WorkerPool(setup, workers) for name, setup in self._setups.items()}
        self._loading: dict[LibraryName, asyncio.Task[Library]] = {}
        self._timeout = timeout
        self._cache: OrderedDict[Guide, Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._refusals: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """Recently refused guides: time until which the refusal is remembered, and its message, by a digest of the
        guide (the guide itself may be large)."""
        self._pending: dict[Guide, asyncio.Task[Compiled]] = {}
        self._waiters: dict[Guide, int] = {}
        self._closed = False

    async def warm_up(self, *, xgrammar: bool) -> None:
        """Load the libraries and start a worker of each: one of llguidance takes 70 MB, one of xgrammar 260 MB.

        xgrammar takes five seconds of processor time, so it is loaded a while after the start. Without `xgrammar`, and
        where memory is scarce, it is loaded for the first request that needs it, and so is what failed here.
        """
        if self._tokenizer.is_file():
            await self._prepare("llguidance")
            if xgrammar and host_memory() >= _AMPLE_BYTES:
                await asyncio.sleep(_LATER_SECONDS)
                await self._prepare("xgrammar")

    async def _prepare(self, name: LibraryName) -> None:
        await asyncio.gather(self._pools[name].start(), asyncio.shield(self._load(name)), return_exceptions=True)

    def matcher(self, guide: Guide) -> Matcher:
        """Return a matcher, ready if the guide has been compiled before."""
        return Matcher(self._stops, self._cache.get(guide))

    async def compile(self, guide: Guide) -> Compiled:
        """Return the compiled guide, from the cache if possible. It is given up when every caller has been cancelled.

        Raises InvalidRequest if the guide cannot be compiled completely and in time, EngineUnavailable if that is not
        the guide's fault, EngineNotReady after `close`.
        """
        if guide in self._cache:
            self._cache.move_to_end(guide)
            return self._cache[guide]
        if self._closed:
            raise EngineNotReady("the engine is closing")
        until, reason = self._refusals.get(_digest(guide), (0.0, ""))
        if time.monotonic() < until:
            raise InvalidRequest(reason, _PARAM)
        task = self._pending.get(guide)
        if task is None:
            task = self._pending[guide] = asyncio.create_task(self._build(guide))
            task.add_done_callback(lambda done: self._built(guide, done))
        self._waiters[guide] = self._waiters.get(guide, 0) + 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise EngineNotReady("the engine is closing") from None
            raise
        finally:
            self._left(guide, task)

    async def close(self) -> None:
        """Cancel pending compilations and stop the workers."""
        self._closed = True
        tasks = [*self._pending.values(), *self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    def _left(self, guide: Guide, task: asyncio.Task[Compiled]) -> None:
        """Note that a caller has stopped waiting; without callers, the compilation is cancelled."""
        self._waiters[guide] -= 1
        if not self._waiters[guide]:
            del self._waiters[guide]
            if not task.done():
                del self._pending[guide]
                task.cancel()

    async def _build(self, guide: Guide) -> Compiled:
        name = library_of(guide)
        # Concurrently, because both take long the first time. The worker's error takes precedence.
        loading = self._load(name)
        prepared = await self._ask(name, guide)
        library = await asyncio.shield(loading)
        return await asyncio.to_thread(library.build, guide, prepared)

    async def _ask(self, name: LibraryName, guide: Guide) -> bytes:
        """Have a worker compile the guide. Return what it is built from here."""
        try:
            reply = await self._pools[name].compile(guide, self._timeout)
        except WorkerTimeoutError:
            raise self._refused(guide, f"compiling it takes longer than {self._timeout:g} seconds") from None
        if reply.error:
            raise self._refused(guide, reply.error)
        return reply.prepared

    def _refused(self, guide: Guide, reason: str) -> InvalidRequest:
        """Remember why a guide is refused."""
        message, digest = _message(guide, reason), _digest(guide)
        self._refusals[digest] = (time.monotonic() + _REFUSAL_SECONDS, message)
        self._refusals.move_to_end(digest)
        while len(self._refusals) > _MAX_REFUSALS:
            self._refusals.popitem(last=False)
        return InvalidRequest(message, _PARAM)

    def _load(self, name: LibraryName) -> asyncio.Task[Library]:
        """Import a library and read the tokenizer once, in a thread; again if it failed."""
        task = self._loading.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loading[name] = asyncio.create_task(asyncio.to_thread(load, self._setups[name]))
        return task

    def _built(self, guide: Guide, task: asyncio.Task[Compiled]) -> None:
        if self._pending.get(guide) is task:
            del self._pending[guide]
        if task.cancelled() or task.exception() is not None:
            return
        compiled = task.result()
        self._cache[guide] = compiled
        self._cached_bytes += compiled.num_bytes + len(guide.spec)
        while self._cached_bytes > _CACHE_BYTES:
            old, evicted = self._cache.popitem(last=False)
            self._cached_bytes -= evicted.num_bytes + len(old.spec)


def fill_bitmask(bitmask: torch.Tensor, matchers: Mapping[int, Filler]) -> None:
    """Have each matcher fill its row of a bitmask that allows every token; those of many share several threads."""
    together = {row: position for row, matcher in matchers.items() if (position := matcher.shared) is not None}
    if len(together) < _MANY:
        together = {}
    for row, matcher in matchers.items():
        if row not in together:
            matcher.fill(bitmask, row)
    if not together:
        return
    started, words = time.perf_counter(), bitmask.numpy()
    fill = next(iter(together.values())).together
    assert fill is not None
    fill(words, [(position, row) for row, position in together.items()])
    slow = time.perf_counter() - started > _SLOW_SECONDS + _SLOW_SECONDS_EACH * len(together)
    empty = (np.bitwise_or.reduce(words, axis=1) == 0).tolist()
    for row in together:
        matchers[row].filled(bitmask, row, empty=empty[row], slow=slow)


def new_bitmask(rows: int, vocab_size: int) -> torch.Tensor:
    """Return a bitmask that allows every token: int32 [rows, ceil(vocab / 32)], on the CPU."""
    return torch.from_numpy(np.full((rows, -(-vocab_size // 32)), -1, dtype=np.int32))


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int]) -> None:
    """Mask the logits of ids whose bit is not set with -inf, in `rows` only. `logits` is float32 [rows, vocab].

    On a CPU by NumPy: torch would share each operation out among threads, and wait for those that have no core.
    """
    if logits.device.type == "cpu":
        values, allowed = logits.numpy(), bitmask.numpy().view(np.uint8)
        for row in rows:
            most = _MOST.take(allowed[row], axis=0, mode="clip").reshape(-1)  # without a check of each index
            np.minimum(values[row], most[: values.shape[1]], out=values[row])
        return
    banned = _unpacked(bitmask[list(rows)].bitwise_not_().view(torch.uint8).to(logits.device))[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits.masked_fill_(banned, -torch.inf)
    else:
        index = torch.tensor(rows, device=logits.device)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(banned, -torch.inf))


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits, bool [rows, 8 * bytes], of uint8 [rows, bytes], the lowest first."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(2).bitwise_right_shift(places).bitwise_and_(1).flatten(1).view(torch.bool)


def _digest(guide: Guide) -> bytes:
    return hashlib.blake2b(f"{guide.kind} {guide.spec}".encode(errors="surrogatepass"), digest_size=16).digest()


def _message(guide: Guide, reason: str) -> str:
    text = f"the {_NAMES.get(guide.kind, guide.kind)} is not supported: {reason}"
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"
