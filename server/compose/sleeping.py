"""Sleep of a replica: orders of operators, and the reported state."""

from engine.kit.tasks import background
from engine.sleep import Sleeper
from server.compose.composition import Composition


async def follow_sleep(to: Composition, sleeper: Sleeper) -> None:
    """Have the replica take orders of sleep, and follow what becomes of them."""
    replica = to.replica
    replica.sleeper = sleeper

    async def follow() -> None:
        async for state in sleeper.sleep_states():
            replica.sleep = state

    await to.stack.enter_async_context(background(follow(), "sleep-state"))
    text = "How deep the engine sleeps: 1 or 2, 0 while it is awake"
    to.metrics.polled.gauge("trtllm_sleep_level", text, lambda: replica.sleep.level, "livemax")
    text = "Seconds that waking up took the last time"
    to.metrics.polled.gauge("trtllm_wake_seconds", text, lambda: replica.sleep.wake_seconds, "livemax")
