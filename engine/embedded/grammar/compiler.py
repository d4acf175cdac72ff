"""Guided decoding: a cache of compiled grammars, and the matcher that follows one sequence through its grammar.

Every grammar is first compiled in the grammar worker, under a time and a memory limit. A grammar that fails there is
rejected; one that passes is safe to compile here. xgrammar is imported in a thread when the first guide arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.embedded.grammar.client import GrammarWorker, WorkerTimeoutError
from engine.embedded.grammar.worker import Setup
from engine.errors import EngineNotReady, InvalidRequest
from engine.types import Guide

if TYPE_CHECKING:
    import xgrammar

_CACHE_BYTES = 256 << 20
_MAX_MESSAGE = 400
_NAMES = {"json_schema": "JSON schema", "json_object": "JSON object", "regex": "regular expression"}
"""Names of the kinds of guides, where they differ from the kind."""
_PARAM = "guide"
# A grammar that compiles may still be slow to follow. Each sequence may spend this much processor time at the start ...
_PATIENCE_SECONDS = 2.0
# ... and this much more with every token.
_TOKEN_SECONDS = 0.02


class Matcher:
    """The position of one sequence in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_token_ids: Sequence[int]) -> None:
        import xgrammar  # noqa: PLC0415

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._stops = frozenset(stop_token_ids)
        self._spent = 0.0
        self.allowance = _PATIENCE_SECONDS
        self.finished = False
        """Whether the grammar is complete and an end-of-sequence token was accepted."""
        self.error = ""
        """Reason why the output cannot follow the grammar any further, or not in time; the request must then fail."""

    def fill(self, bitmask: torch.Tensor, row: int) -> None:
        """Set the bits of the ids that may come next in `row` of int32 [rows, ceil(vocab / 32)], on the CPU."""
        started = time.thread_time()
        if not self.finished:
            self._matcher.fill_next_token_bitmask(bitmask, row)
            if not self.error and not bool(bitmask[row].any()):
                self.error = "no token of the model continues the grammar"
        if self.finished or self.error:
            bitmask[row] = 0
            for token_id in self._stops:
                bitmask[row, token_id // 32] |= 1 << token_id % 32 if token_id % 32 < 31 else -(2**31)
        self._spend(started)

    def accept(self, token_id: int) -> bool:
        """Advance by a token of the output. Return False, and stay, if the grammar does not allow it.

        After the end of the grammar every token is accepted.
        """
        if self.finished or self.error:
            return True
        started = time.thread_time()
        accepted = self._matcher.accept_token(token_id)
        self.finished = self._matcher.is_terminated()
        self.allowance += _TOKEN_SECONDS
        self._spend(started)
        return accepted

    def _spend(self, started: float) -> None:
        self._spent += time.thread_time() - started
        if self._spent > self.allowance:
            self.error = "the grammar is too ambiguous to be followed token by token"


class CompiledGuide:
    """A compiled grammar that any number of sequences can share."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, stop_token_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._stop_token_ids = tuple(stop_token_ids)
        self.num_bytes: int = compiled.memory_size_bytes

    def matcher(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        return Matcher(self._compiled, self._stop_token_ids)


class GrammarCompiler:
    """Compiles guides off the event loop and caches the results, up to `_CACHE_BYTES`. For use on one event loop.

    `vocab_size` is the model's, padding included. `timeout` is in seconds, counted from when the worker starts on a
    guide.
    """

    def __init__(self, tokenizer_folder: Path, vocab_size: int, eos_token_ids: Sequence[int], timeout: float) -> None:
        self._setup = Setup(str(tokenizer_folder.resolve()), vocab_size, tuple(eos_token_ids))
        self._timeout = timeout
        self._worker = GrammarWorker(self._setup)
        self._local: tuple[xgrammar.TokenizerInfo, xgrammar.GrammarCompiler] | None = None
        self._turn = asyncio.Lock()
        self._cache: OrderedDict[Guide, CompiledGuide] = OrderedDict()
        self._cached_bytes = 0
        self._pending: dict[Guide, asyncio.Task[CompiledGuide]] = {}
        self._closed = False

    async def compile(self, guide: Guide) -> CompiledGuide:
        """Return the compiled guide, from the cache if possible.

        Raises InvalidRequest if the guide cannot be compiled completely and in time, EngineNotReady after `close`.
        """
        if guide in self._cache:
            self._cache.move_to_end(guide)
            return self._cache[guide]
        if self._closed:
            raise EngineNotReady("the engine is closing")
        task = self._pending.get(guide)
        if task is None:
            task = self._pending[guide] = asyncio.create_task(self._build(guide))
            task.add_done_callback(lambda done: self._built(guide, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineNotReady("the engine is closing") from None
            raise

    async def close(self) -> None:
        """Cancel pending compilations and stop the worker."""
        self._closed = True
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._worker.close()

    async def _build(self, guide: Guide) -> CompiledGuide:
        async with self._turn:
            # Concurrently, because both take seconds the first time. The worker's error takes precedence.
            reply, loaded = await asyncio.gather(
                self._ask(guide), asyncio.to_thread(self._load), return_exceptions=True
            )
            if isinstance(reply, BaseException):
                raise reply
            if isinstance(loaded, BaseException):
                raise loaded
            return await asyncio.to_thread(self._compile_here, guide, reply)

    async def _ask(self, guide: Guide) -> bytes:
        """Have the worker compile the guide. Return the serialised result, or b"" to have it compiled here again."""
        try:
            reply = await self._worker.compile(guide, self._timeout)
        except WorkerTimeoutError:
            raise InvalidRequest(
                _message(guide, f"compiling it takes longer than {self._timeout:g} seconds"), _PARAM
            ) from None
        if reply.error:
            raise InvalidRequest(_message(guide, reply.error), _PARAM)
        return reply.compiled

    def _load(self) -> None:
        """Import xgrammar and read the tokenizer once. Runs in a thread."""
        from engine.embedded.grammar.guides import load_compiler  # noqa: PLC0415

        if self._local is None:
            self._local = load_compiler(self._setup)

    def _compile_here(self, guide: Guide, serialised: bytes) -> CompiledGuide:
        import xgrammar  # noqa: PLC0415

        from engine.embedded.grammar.guides import compile_guide  # noqa: PLC0415

        assert self._local is not None
        info, compiler = self._local
        if serialised:
            compiled = xgrammar.CompiledGrammar.deserialize_json(serialised.decode(), info)
        else:
            compiled = compile_guide(compiler, guide)
        return CompiledGuide(compiled, self._setup.eos_token_ids)

    def _built(self, guide: Guide, task: asyncio.Task[CompiledGuide]) -> None:
        del self._pending[guide]
        if task.cancelled() or task.exception() is not None:
            return
        compiled = task.result()
        self._cache[guide] = compiled
        self._cached_bytes += compiled.num_bytes + len(guide.spec)
        while self._cached_bytes > _CACHE_BYTES:
            old, evicted = self._cache.popitem(last=False)
            self._cached_bytes -= evicted.num_bytes + len(old.spec)


def new_bitmask(rows: int, vocab_size: int) -> torch.Tensor:
    """Return a bitmask that allows every token: int32 [rows, ceil(vocab / 32)], on the CPU."""
    return torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int]) -> None:
    """Mask the logits of ids whose bit is not set with -inf, in `rows` only. `logits` is float32 [rows, vocab]."""
    import xgrammar  # noqa: PLC0415

    xgrammar.apply_token_bitmask_inplace(
        logits, bitmask.to(logits.device), vocab_size=logits.shape[1], indices=list(rows)
    )


def _message(guide: Guide, reason: str) -> str:
    text = f"the {_NAMES.get(guide.kind, guide.kind)} is not supported: {reason}"
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"
