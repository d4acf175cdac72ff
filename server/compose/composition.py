"""State that composers share: the replica that they compose, its settings, metrics and cleanup."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.kit.tasks import background
from engine.sleep import Sleeper
from routers.state import ReplicaState
from server.health.readiness import Health
from server.metrics.page import ServerMetrics
from server.roles import Role
from server.settings import Settings

if TYPE_CHECKING:
    from engine.process.child import SpareHost
    from routers.dynamo.worker import DynamoGraph

Failed = Callable[[], Awaitable[str]]
"""Waits until a part has failed for good, and returns the reason."""


@dataclass(frozen=True, eq=False)
class Composition:
    """A replica while it is composed. A composer makes a part from the settings, gives it to `replica`, registers its
    metrics and its readiness checks, and pushes its cleanup onto `stack`.
    """

    settings: Settings
    role: Role
    replica: ReplicaState
    metrics: ServerMetrics
    health: Health
    stack: AsyncExitStack
    spare: "SpareHost | None" = None
    """A process that the engine may use, if one was spawned ahead."""
    graph: "DynamoGraph | None" = None
    """The Dynamo graph that the replica joins, if it joins one."""

    @property
    def internal_secret(self) -> str:
        return self.settings.internal_secret.get_secret_value() if self.settings.internal_secret else ""


async def never() -> str:
    """The `Failed` of a part that cannot fail for good."""
    waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return await waiting


async def follow_sleep(to: Composition, sleeper: Sleeper) -> None:
    """Have the replica accept orders to sleep, and keep its state and metrics of sleep up to date."""
    replica = to.replica
    replica.sleeper = sleeper

    async def follow() -> None:
        async for state in sleeper.sleep_states():
            replica.sleep = state

    await to.stack.enter_async_context(background(follow(), "sleep-state"))
    text = "How deep the engine sleeps: 1 or 2, 0 while it is awake"
    to.metrics.polled.gauge("trtllm_sleep_level", text, lambda: replica.sleep.level, "livemax")
    text = "Seconds that the latest wake-up took"
    to.metrics.polled.gauge("trtllm_wake_seconds", text, lambda: replica.sleep.wake_seconds, "livemax")
