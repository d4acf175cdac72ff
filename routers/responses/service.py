"""Responses between requests: their history, their storage, and responses that run in the background."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from msgspec.structs import replace

from engine.errors import ContextOverflow
from engine.kit.tasks import cancel
from engine.kit.work import off_loop
from multimodal.answers.responses import PREFIXES, ResponsesShape
from multimodal.errors import RequestError, shown
from multimodal.processor import Generation
from protocol.responses import ContextFields, InputItem
from routers.database import StoreUnavailable
from routers.errors import NotFound
from routers.responses.convert import conversation_of, items_of
from routers.responses.store import FINAL, Record, ResponseStore

FLUSH_SECONDS = 0.05
"""Seconds between writes of a background response's events."""
BEAT_SECONDS = 1.0
"""Seconds between heartbeats of its process, which also checks whether it was cancelled elsewhere."""
STALE_SECONDS = 30.0
"""Seconds without a heartbeat after which its process is considered dead."""
_POLL_SECONDS = 0.2
_SHUT_DOWN = {"code": "server_error", "message": "The server was shut down."}
_LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})
_TYPES = {"function_call": "call", "function_call_output": "call", "reasoning": "reasoning"}
_TYPES |= {"custom_tool_call": "custom", "custom_tool_call_output": "custom"}

ErrorOf = Callable[[Exception], dict[str, Any]]
"""Returns the `error` of a response that failed."""
Kept = Mapping[str, Sequence[Record]]
"""Responses that only one connection knows, by id: each after those that it continues."""


@dataclass(frozen=True)
class History:
    """The conversation of a request: items of the responses that it continues, and its own input."""

    earlier: list[InputItem]
    own: list[InputItem]
    previous: str | None
    """The response that it continues."""
    records: Sequence[Record] = ()
    """The responses that precede it, oldest first, and the previous response."""


@dataclass(eq=False)
class BackgroundRun:
    """A background response of this process."""

    task: asyncio.Task[None] = field(init=False)
    cancelled: bool = False
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end it early, because it was cancelled or the server shuts down."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, whenever events have been stored."""


@dataclass(eq=False)
class Responses:
    """The responses of one process; its store is shared with others. Without a store nothing is kept."""

    store: ResponseStore | None = None
    max_bytes: int = 64 << 20
    """Maximum number of bytes of the items that a request continues, and of those that it refers to."""
    _runs: dict[str, BackgroundRun] = field(default_factory=dict, init=False)

    def stored(self) -> ResponseStore:
        """Return the store. Raises RequestError if there is none."""
        if self.store is None:
            raise RequestError("This server stores no responses (RESPONSES_STORE_MB).", None, "unsupported_parameter")
        return self.store

    async def history(self, owner: str, body: ContextFields, kept: Kept | None = None) -> History:
        """Return the conversation before a request, on a connection that has `kept` responses. Raises RequestError."""
        kept = kept or {}
        previous, conversation = body.previous_response_id, conversation_of(body)
        if previous is not None and conversation is not None:
            raise RequestError("'conversation' and 'previous_response_id' exclude each other.", "conversation")
        own = await self._resolved(owner, items_of(body.input), kept)
        param = "previous_response_id"
        if conversation is not None:
            previous = await self.stored().last(owner, conversation)
            param = "conversation"
        if previous is None:
            return History([], own, None)
        records = kept.get(previous) or await self._chain(owner, previous, param, kept)
        earlier = await off_loop(size_of(records), lambda: [InputItem.model_validate(item) for item in _items(records)])
        return History(earlier, own, previous, records)

    async def get(self, owner: str, response: str) -> Record:
        """Return a stored response; one whose process has died meanwhile has failed. Raises NotFound."""
        record = await self.stored().get(owner, response)
        if record is None:
            raise _not_found(response)
        return await self._current(record)

    async def items(self, owner: str, response: str) -> list[dict[str, Any]]:
        """Return the input items of a stored response, oldest first, if still stored. Raises NotFound."""
        records = await self.stored().chain(owner, response, self.max_bytes)
        if not records:
            raise _not_found(response)
        *earlier, record = records
        return await off_loop(size_of(records), lambda: [*_items(earlier), *orjson.loads(record.items)])

    async def save(self, record: Record, shape: ResponsesShape) -> bool:
        """Store the final state of a response, and return whether that succeeded."""
        if self.store is not None:
            with suppress(StoreUnavailable):
                await self.store.put(recorded(record, shape))
                return True
        shape.stored = False
        return False

    async def begin(
        self,
        record: Record,
        generation: Generation,
        shape: ResponsesShape,
        error_of: ErrorOf,
        at_end: Callable[[], None],
    ) -> bytes:
        """Generate a response in the background, and return it as it is now. `at_end` is called in any case."""
        try:
            events, queued = shape.queued(), orjson.dumps(shape.response())
            store = self.stored()
            await store.put(replace(record, response=queued))
            await store.append(record.id, 0, events)
        except BaseException:
            at_end()
            raise
        run = BackgroundRun()
        run.task = asyncio.create_task(self._run(run, record, generation, shape, error_of), name=record.id)
        self._runs[record.id] = run

        def ended(_: asyncio.Task[None]) -> None:
            del self._runs[record.id]
            at_end()

        run.task.add_done_callback(ended)
        return queued

    async def follow(self, owner: str, response: str, after: int) -> AsyncGenerator[bytes]:
        """Yield the events of a background response that come after one, to its end. Raises NotFound, and
        RequestError if none can come.
        """
        store = self.stored()
        record = await self.get(owner, response)
        first = after
        last = (await store.events(response, after - 1))[:1] if after >= 0 else []
        while True:
            run = self._runs.get(response)
            changed = run.changed if run is not None else None
            known = await store.get(owner, response)
            record = await self._current(known or record)
            events = await store.events(response, after)
            for event in events:
                after += 1
                last = [event]
                yield event
            if events:
                continue
            if record.status in FINAL or (run is None and known is None):
                break
            waiting = changed.wait() if changed is not None else asyncio.sleep(_POLL_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await waiting
        ended = bool(last) and orjson.loads(last[0])["type"] in _LAST
        if after == first >= 0 and (ended or not last):
            raise RequestError("'starting_after' is the last event, or none.", "starting_after")
        if not ended:  # its process has died, or it was deleted
            failed = {"type": "response.failed", "sequence_number": after + 1}
            status = record.status if record.status in FINAL else "cancelled"
            yield orjson.dumps({**failed, "response": orjson.loads(record.response) | {"status": status}})

    async def cancel(self, owner: str, response: str) -> Record:
        """Cancel a background response and return it. Raises RequestError."""
        record = await self.get(owner, response)
        if not record.background:
            raise RequestError("Only responses made with 'background' can be cancelled.", "response_id")
        await self._stop(owner, response)
        while record.status not in FINAL:
            await asyncio.sleep(FLUSH_SECONDS)
            record = await self.get(owner, response)
        return record

    async def delete(self, owner: str, response: str) -> None:
        """Delete a response, and end it if it runs. Raises NotFound."""
        store = self.stored()
        if not await store.delete(owner, response):
            raise _not_found(response)
        if (run := self._runs.get(response)) is not None:
            run.cancelled = True
            run.stop.set()

    async def close(self) -> None:
        """End responses in the background, and close the store."""
        for run in self._runs.values():
            run.stop.set()
        if self._runs:
            await asyncio.wait([run.task for run in self._runs.values()])
        if self.store is not None:
            await self.store.close()

    async def _stop(self, owner: str, response: str) -> None:
        await self.stored().cancel(owner, response)
        if (run := self._runs.get(response)) is not None:
            run.cancelled = True
            run.stop.set()

    async def _current(self, record: Record) -> Record:
        """Return a response; as failed if its process has died."""
        silent = time.time() - record.beat > STALE_SECONDS
        if record.status in FINAL or not silent or record.id in self._runs:
            return record
        error = {"code": "server_error", "message": "The server ended while it generated the response."}
        failed = orjson.loads(record.response) | {"status": "failed", "error": error}
        record = replace(record, status="failed", response=orjson.dumps(failed))
        await self.stored().put(record)
        return record

    async def _chain(self, owner: str, response: str, param: str, kept: Kept) -> list[Record]:
        """Return a stored response after those that it continues, of which the first may be `kept`. Raises
        RequestError, which names the field `param`.
        """
        try:
            found = await self.store.chain(owner, response, self.max_bytes) if self.store is not None else []
        except ContextOverflow as error:
            raise error.at(param) from error
        missing = found[0].previous if found else response
        if missing is not None:
            if missing not in kept:
                said = f"Previous response with id '{shown(missing)}' not found."
                raise RequestError(said, param, "previous_response_not_found")
            found = [*kept[missing], *found]
        if (await self._current(found[-1])).status not in FINAL:
            raise RequestError(f"The response '{shown(response)}' has not ended yet.", param)
        return found

    async def _resolved(self, owner: str, items: list[InputItem], kept: Kept) -> list[InputItem]:
        """Return items, with references replaced by the items that they name. Raises RequestError."""
        found: list[InputItem] = []
        read: set[str] = set()
        known: dict[str, tuple[InputItem, int]] = {}
        """Items of the responses that have been read, and their bytes."""
        left = self.max_bytes
        for place, item in enumerate(items):
            if not is_reference(item):
                found.append(item)
                continue
            named = item.id or ""
            response = response_of(named)
            if response not in read:
                read.add(response)
                record = kept[response][-1] if response in kept else None
                if record is None and self.store is not None:
                    record = await self.store.get(owner, response)
                if record is not None:
                    known |= await off_loop(record.size, partial(_sized, record))
            param = f"input.{place}.id"
            if named not in known:
                raise RequestError(f"Item with id '{shown(named)}' not found.", param, "item_not_found")
            item, size = known[named]
            if (left := left - size) < 0:
                said = f"The items that 'input' refers to have more than {self.max_bytes} bytes."
                raise ContextOverflow(said, param)
            found.append(item)
        return found

    async def _run(
        self, run: BackgroundRun, record: Record, generation: Generation, shape: ResponsesShape, error_of: ErrorOf
    ) -> None:
        store = self.stored()
        number = shape.numbers
        error: dict[str, Any] | None = None
        pending: list[bytes] = []

        async def consume() -> None:
            pending.extend(shape.begin())
            async with aclosing(generation.stream()) as chunks:
                async for chunk in chunks:
                    pending.append(chunk)

        async def flush(ended: Record | None = None) -> bool:
            nonlocal number
            events, pending[:] = pending[:], []
            number += len(events)
            goes_on = await store.append(record.id, number - len(events), events, ended)
            run.changed.set()
            run.changed = asyncio.Event()
            return goes_on

        consuming, stopping = asyncio.create_task(consume()), asyncio.create_task(run.stop.wait())
        flushed = 0.0
        try:
            while not (consuming.done() or run.stop.is_set()):
                await asyncio.wait((consuming, stopping), timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if consuming.done() or not (pending or time.monotonic() - flushed > BEAT_SECONDS):
                    continue
                if not flushed:
                    await store.put(recorded(record, shape))
                flushed = time.monotonic()
                if not await flush():
                    run.cancelled = True
                    run.stop.set()
            if consuming.done():
                consuming.result()
        except Exception as failure:  # of any kind: the response says what it was
            error = error_of(failure)
        await cancel([consuming, stopping])
        if not shape.ended:
            cancelled = run.cancelled and error is None
            pending.extend(
                shape.break_off("cancelled") if cancelled else shape.break_off("failed", error or _SHUT_DOWN)
            )
        with suppress(StoreUnavailable):
            await flush(recorded(record, shape))
        run.changed.set()


def recorded(record: Record, shape: ResponsesShape) -> Record:
    """Return the current record of a response."""
    response = shape.response()
    return replace(record, status=response["status"], response=orjson.dumps(response))


def size_of(records: Iterable[Record]) -> int:
    """Return the bytes of responses and their input."""
    return sum(record.size for record in records)


def _items(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield the input and output items of responses."""
    for record in records:
        yield from orjson.loads(record.items)
        yield from orjson.loads(record.response)["output"]


def response_of(item: str) -> str:
    """Return the id of the response that an item belongs to, by the item's id."""
    return f"resp_{item.partition('_')[2][:32]}"


def is_reference(item: InputItem) -> bool:
    """Return whether an item is a reference to an item of a response."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _sized(record: Record) -> dict[str, tuple[InputItem, int]]:
    """Return the items of a response by their ids, each with its bytes."""
    return {item["id"]: (InputItem.model_validate(item), len(orjson.dumps(item))) for item in _items([record])}


def numbered(items: list[InputItem], unique: str) -> bytes:
    """Return input items as they are stored, each with an id."""
    return orjson.dumps([_stored(item, f"{unique}i{place:04x}") for place, item in enumerate(items)])


def _stored(item: InputItem, unique: str) -> dict[str, Any]:
    kind = item.type or "message"
    found = item.model_dump(exclude_none=True) | {"type": kind}
    found["id"] = item.id or PREFIXES.get(_TYPES.get(kind, "text"), "msg_") + unique
    if kind == "message":
        assistant = item.role == "assistant"
        if isinstance(item.content, str):
            part = {"type": "output_text", "annotations": []} if assistant else {"type": "input_text"}
            found["content"] = [part | {"text": item.content}]
        found.setdefault("status", "completed")
    if kind == "reasoning":
        found.setdefault("summary", [])
    for part in found.get("content", ()) if kind == "message" else ():
        if part["type"] == "input_image":
            part.setdefault("detail", "auto")
    return found


def _not_found(response: str) -> NotFound:
    return NotFound(f"Response with id '{shown(response)}' not found.", "response_id", "response_not_found")
