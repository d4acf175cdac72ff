"""The engine's process, spawned before the server has imported its modules: both import at the same time."""

from contextlib import suppress

from engine.process.child import SpareHost
from engine.process.engine_service import ENGINE
from server.roles import role_of
from server.settings import Settings


async def spare_host(settings: Settings) -> SpareHost | None:
    """Spawn a process for the embedded engine; None if the replica has none, or if the system cannot spawn one: then
    serving says why."""
    embedded = settings.engine == "embedded" and role_of(settings).core == "engine"
    if not embedded or not settings.engine_process or settings.engine_address:
        return None
    with suppress(OSError):
        return await SpareHost.spawn(ENGINE, settings.device)
    return None
