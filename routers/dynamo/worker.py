"""A replica in a Dynamo graph: runtime, model card, registration and discovery, for every kind of worker.

Errors become Dynamo's here: the frontend answers an invalid request with 400, and migrates requests that another worker
may serve.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from dynamo._core import get_reasoning_parser_names, get_tool_parser_names
from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument, Unknown
from dynamo.runtime import Client, Context, DistributedRuntime, Endpoint

from engine.errors import EngineError, EngineFailure, EngineUnavailable, InvalidRequest, QueueFull, QueueTimeout
from engine.kit.tasks import cancel
from protocol.dynamo import DynamoRequest
from routers.dynamo.convert import read_request
from routers.dynamo.handoffs import Call, Claim, DynamoPrefills
from routers.state import ReplicaState

T = TypeVar("T")
WorkerRole = Literal["aggregated", "prefill", "decode", "encode"]
LEASE = "lease"
"""Name of the endpoint, beside `generate`, whose calls are leases of KV blocks, or give embeddings up."""
_HEALTH_SECONDS = 0.5
"""Pause between looks at the replica's readiness."""
PROBE = "_HEALTH_CHECK"
"""Key with which Dynamo marks its health checks."""
_TYPES: Mapping[WorkerRole, tuple[WorkerType, list[list[WorkerType]]]] = {
    "aggregated": (WorkerType.Aggregated, []),
    "prefill": (WorkerType.Prefill, [[WorkerType.Decode]]),
    "decode": (WorkerType.Decode, [[WorkerType.Prefill]]),
    "encode": (WorkerType.Encode, [[WorkerType.Prefill, WorkerType.Decode], [WorkerType.Aggregated]]),
}
"""The type of a worker with each role, and the other types that the graph needs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Location of the graph, and how its workers are found and asked. Fields mean the same as the settings."""

    namespace: str
    component: str
    endpoint: str
    discovery: str
    request_plane: str
    event_plane: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """Facts of the model card that do not come from the engine."""

    folder: Path
    name: str
    chat_template: Path | None
    tool_parser: str
    reasoning_parser: str
    kv_events: bool


class DynamoGraph:
    """The runtime of this process in a graph. One for each process: Dynamo's threads end with it."""

    def __init__(self, config: GraphConfig, runtime: DistributedRuntime) -> None:
        self.config = config
        self.runtime = runtime
        self.generate = self.endpoint(config.endpoint)
        self._clients: dict[str, Client] = {}

    @classmethod
    def open(cls, config: GraphConfig) -> Self:
        """Return the runtime, connected. Raises EngineFailure if the graph's services cannot be reached."""
        loop = asyncio.get_running_loop()
        try:
            return cls(
                config,
                DistributedRuntime(loop, config.discovery, config.request_plane, event_plane=config.event_plane),
            )
        except Exception as error:  # the runtime raises Exception itself
            raise EngineFailure(f"cannot join the Dynamo graph by {config.discovery}: {error}") from error

    def endpoint(self, name: str) -> Endpoint:
        return self.runtime.endpoint(self.path(name))

    def path(self, name: str) -> str:
        return f"{self.config.namespace}.{self.config.component}.{name}"

    async def call(self, claim: Claim, context: Context) -> AsyncIterator[Any]:
        """Claim a lease."""
        client = self._clients.get(claim.endpoint)
        if client is None:
            client = self._clients[claim.endpoint] = await self.runtime.endpoint(claim.endpoint).client()
        if claim.instance not in client.instance_ids():
            await client.wait_for_instances()
        asked = {"lease": claim.lease}
        async for item in await client.direct(asked, claim.instance, annotated=False, context=context):
            yield item

    async def give_up(self, claim: Claim) -> None:
        """Report that held embeddings have been read."""
        async for _ in self.call(claim, Context()):
            pass

    def prefills(self) -> DynamoPrefills:
        """Return the source of computed prompts of a decode worker."""
        call: Call = self.call
        return DynamoPrefills(call, Context)


def tool_parser(asked: str, own: str) -> str:
    """Return the frontend's parser of tool calls: the one asked for, with `auto` our `own` if Dynamo has it."""
    return _parser(asked, own, get_tool_parser_names(), "tool calls")


def reasoning_parser(asked: str, own: str) -> str:
    """Return the frontend's parser of reasoning: the one asked for, with `auto` our `own` if Dynamo has it."""
    return _parser(asked, own, get_reasoning_parser_names(), "reasoning")


def _parser(asked: str, own: str, known: list[str], what: str) -> str:
    if asked == "auto":
        return own if own in known else ""
    if asked and asked not in known:
        raise EngineFailure(f"Dynamo has no parser of {what} named {asked}; it has {', '.join(sorted(known))}")
    return asked


Served = tuple[Endpoint, Callable[..., AsyncGenerator[Any, None]], dict[str, Any] | None]
"""An endpoint, its handler, and the request that checks its health."""
Duty = tuple[str, Coroutine[Any, Any, None]]
"""A background task of a worker, and its name."""


class GraphWorker(ABC):
    """One replica in a graph, from `start` to `close`. It is found there while the replica is ready.

    When the replica drains, it leaves discovery at once, takes requests for `drain_seconds` more, from frontends that
    have not noticed yet, and lets them end.
    """

    def __init__(
        self, graph: DynamoGraph, role: WorkerRole, replica: ReplicaState, card: Card, drain_seconds: float
    ) -> None:
        self._graph = graph
        self._role = role
        self._replica = replica
        self._card = card
        self._drain_seconds = drain_seconds
        self._closed = False
        self._registered = False
        self._served: list[asyncio.Future[Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Register the model and serve. Raises EngineFailure."""
        graph = self._graph
        try:
            await self._register()
            for endpoint, handler, probe in ((graph.generate, self._generate, self._probe()), *self._further()):
                served = endpoint.serve_endpoint(handler, graceful_shutdown=True, health_check_payload=probe)
                self._served.append(asyncio.ensure_future(served))
            await asyncio.sleep(0)
        except Exception as error:  # the runtime raises Exception itself
            raise EngineFailure(f"cannot serve in the Dynamo graph: {error}") from error
        self._registered = self._replica.registered = True
        for name, duty in (("dynamo-discovery", self._follow()), *self._duties()):
            self._tasks.append(asyncio.create_task(duty, name=name))
        config = graph.config
        log.info(
            "serves %s in the Dynamo graph at %s as %s (%s, %s, %s), instance %d",
            self._card.name,
            graph.path(config.endpoint),
            self._role,
            config.discovery,
            config.request_plane,
            config.event_plane,
            graph.generate.connection_id(),
        )

    @abstractmethod
    def _generate(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        """Serve `generate`."""

    @abstractmethod
    def _probe(self) -> dict[str, Any]:
        """Return the request that Dynamo's runtime sends as a health check."""

    @abstractmethod
    def _facts(self, facts: ModelRuntimeConfig) -> tuple[ModelType, int | None]:
        """Fill in the model card; return the kinds of requests that the model serves, and the tokens of a KV block."""

    def _further(self) -> tuple[Served, ...]:
        """Return the endpoints other than `generate`."""
        return ()

    def _duties(self) -> tuple[Duty, ...]:
        """Return the background tasks."""
        return ()

    @abstractmethod
    async def _release(self) -> None:
        """Release resources that are held for other workers, and those of this one."""

    async def close(self) -> None:
        """Leave the graph and end the runtime."""
        self._closed = True
        await cancel(self._tasks)
        await self._leave()
        await self._release()
        self._graph.runtime.shutdown()
        if self._served:
            await asyncio.wait(self._served, timeout=self._drain_seconds)

    def failure(self) -> str:
        """Return the reason why the graph can no longer use the worker; empty if it can."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                return f"{task.get_name()} has ended: {error}"
        if not self._closed and any(served.done() for served in self._served):
            return "Dynamo's runtime has ended."
        return ""

    async def _register(self) -> None:
        card, facts = self._card, ModelRuntimeConfig()
        model_type, block_size = self._facts(facts)
        worker_type, needs = _TYPES[self._role]
        await register_model(
            ModelInput.Tokens,
            model_type,
            self._graph.generate,
            str(card.folder),
            card.name,
            worker_type=worker_type,
            kv_cache_block_size=block_size,
            runtime_config=facts,
            custom_template_path=None if card.chat_template is None else str(card.chat_template),
            needs=needs,
        )

    def _read(self, body: Any) -> tuple[DynamoRequest, bool]:
        """Return the request, and whether it is a health check."""
        return self._wrong(read_request, body), isinstance(body, dict) and body.get(PROBE) is True

    @staticmethod
    def _wrong(work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `work`; its errors become Dynamo's."""
        try:
            return work(*arguments)
        except EngineError as error:
            raise translated(error) from None  # Dynamo logs the whole chain

    def _count(self, more: int) -> None:
        self._replica.running += more

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request that a shutdown waits for. Raises EngineShutdown once the time for stragglers is over."""
        if self._replica.draining and not self._replica.registered:
            raise EngineShutdown("the replica is shutting down")
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    async def _follow(self) -> None:
        """Stay in discovery while the replica is ready, and leave for good when it drains."""
        drain = asyncio.create_task(self._replica.stopping.wait())
        try:
            while not drain.done():
                await self._set_registered(self._replica.ready)
                await asyncio.wait({drain}, timeout=_HEALTH_SECONDS)
            await self._leave()
            await asyncio.sleep(self._drain_seconds)
        finally:
            drain.cancel()
            self._replica.registered = False

    async def _set_registered(self, registered: bool) -> None:
        """Enter or leave discovery; what fails is tried again."""
        if registered == self._registered:
            return
        endpoint = self._graph.generate
        try:
            await (endpoint.register_endpoint_instance() if registered else endpoint.unregister_endpoint_instance())
            self._graph.runtime.set_health_status(registered)
        except Exception as error:  # the runtime raises Exception itself
            log.warning("the registry of the Dynamo graph does not answer: %s", error)
            return
        self._registered = registered
        reasons = "; ".join(reason for _, reason in self._replica.missing)
        log.warning(
            "%s the Dynamo graph%s", "joined" if registered else "left", f": {reasons}" if reasons else " again"
        )

    async def _leave(self) -> None:
        if self._registered:
            self._registered = False
            with suppress(Exception):  # the registry may be gone
                self._graph.runtime.set_health_status(False)
                await self._graph.generate.unregister_endpoint_instance()
                await unregister_model(self._graph.generate)


def translated(error: EngineError) -> Exception:
    """Return Dynamo's error for one of ours. The frontend makes a 400 of InvalidArgument, its answer to overload of a
    503, and migrates that and EngineShutdown to other workers as far as it may.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, InvalidRequest):
        return InvalidArgument(text)
    if isinstance(error, QueueFull | QueueTimeout):
        return HttpError(503, text)
    if isinstance(error, EngineUnavailable):
        return EngineShutdown(text)
    return Unknown(text)
