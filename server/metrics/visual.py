"""Metrics of pictures and videos, as the engine reports them."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from engine.kit.tasks import background
from engine.visual.base import VisualEngine
from engine.visual.types import VisualStats
from server.metrics.polled import Polled

_COUNTERS = {
    "batches": ("visual_batches", "Batches of pictures that were computed"),
    "steps": ("visual_steps", "Denoising steps of batches"),
    "images": ("visual_images", "Pictures that were made"),
    "videos": ("visual_videos", "Videos that were made"),
    "frames": ("visual_frames", "Frames of pictures and videos that were made"),
    "aborted": ("visual_aborted", "Pictures and videos whose clients had left"),
    "failed": ("visual_failed", "Requests for pictures and videos that failed in the engine"),
    "busy_seconds": ("visual_busy_seconds", "Seconds in which batches were computed"),
}
_GAUGES = {
    "waiting": ("visual_waiting", "Pictures and videos that wait to be computed"),
    "running": ("visual_running", "Pictures and videos that are being computed"),
    "encoding": ("visual_encoding", "Pictures and videos that are being written to files"),
}


@asynccontextmanager
async def watch_visual(
    polled: Polled, engine: VisualEngine, jobs: Callable[[], Mapping[str, float]]
) -> AsyncIterator[None]:
    """Show the figures of an engine, and how jobs of videos ended, during the block."""
    shown = VisualStats()
    before = VisualStats()
    """Figures of engine processes that have ended."""

    async def follow() -> None:
        nonlocal shown, before
        async for stats in engine.stats():
            if stats.batches < shown.batches or stats.steps < shown.steps:  # of another process
                sums = {name: getattr(before, name) + getattr(shown, name) for name in _COUNTERS}
                before = VisualStats(**sums)
            shown = stats

    def reader(name: str, *, total: bool) -> Callable[[], float]:
        return lambda: getattr(shown, name) + (getattr(before, name) if total else 0)

    for field, (name, text) in _COUNTERS.items():
        polled.counter(f"trellis_{name}", text, reader(field, total=True))
    for field, (name, text) in _GAUGES.items():
        polled.gauge(f"trellis_{name}", text, reader(field, total=False), "livesum")
    polled.counters("trellis_video_jobs", "Jobs of videos that have ended", "outcome", jobs)
    async with background(follow(), "visual-statistics"):
        yield
