"""The readiness of one API process. Composers register the checks of what they compose."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from engine.kit.tasks import background
from routers.state import ReplicaState
from server.health.canary import OUTCOMES, Canary, Probe
from server.health.watchdog import Watchdog
from server.metrics.page import ServerMetrics
from server.metrics.replica import WatchdogMetrics, show_identity, watch_checks
from server.roles import Role
from server.settings import Settings


class Health:
    """Checks that readiness depends on, by name, in the order in which they are added."""

    def __init__(self, settings: Settings, role: Role, metrics: ServerMetrics, replica: ReplicaState) -> None:
        self._settings = settings
        self._checks = replica.checks
        self._canaries = Counter(dict.fromkeys(OUTCOMES, 0))
        self._watchdog = Watchdog(settings.watchdog_seconds, WatchdogMetrics(metrics.registry).report)
        backend = settings.engine if role.has_model else "none"
        show_identity(metrics.registry, replica.model_name, role.name, backend)
        watch_checks(metrics.polled_unlabelled, lambda: replica.ready, lambda: self._canaries)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the event loop during the block."""
        self.check("event_loop", self._watchdog.reason)
        async with self._watchdog.watching():
            yield

    def check(self, name: str, reason: Callable[[], str]) -> None:
        """Make readiness depend on a part. `reason`, a cheap call, returns why the part is not ready; empty if it
        is."""
        self._checks[name] = reason

    async def add_canary(
        self, probe: Probe, activity: Callable[[], int], up: Callable[[], bool], stack: AsyncExitStack
    ) -> None:
        """Send canary requests until `stack` is closed, if they are enabled, and make readiness depend on them."""
        if not self._settings.canary_seconds:
            return
        canary = Canary(probe, activity, up, lambda outcome: self._canaries.update([outcome]))
        self.check("canary", canary.reason)
        run = canary.run(self._settings.canary_seconds, self._settings.canary_timeout_seconds)
        await stack.enter_async_context(background(run, "canary"))
