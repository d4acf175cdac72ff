"""State that composers share: the replica that they compose, its settings, metrics and cleanup."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from routers.state import ReplicaState
from server.health.readiness import Health
from server.metrics.page import ServerMetrics
from server.roles import Role
from server.settings import Settings

if TYPE_CHECKING:
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
    graph: "DynamoGraph | None" = None
    """The Dynamo graph that the replica joins, if it joins one."""

    @property
    def internal_secret(self) -> str:
        return self.settings.internal_secret.get_secret_value() if self.settings.internal_secret else ""


async def never() -> str:
    """The `Failed` of a part that cannot fail for good."""
    waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return await waiting
