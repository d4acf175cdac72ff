"""Sleep and wake, for operators: the routes of vLLM, and those of TensorRT-LLM. They need the admin key."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from engine.config import Tag
from engine.errors import EngineNotReady, NotSupported
from engine.sleep import TAGS, Sleeper, SleepOrder
from multimodal.errors import RequestError, shown
from routers.state import ReplicaDep, ReplicaState

router = APIRouter(tags=["sleep"])

_TENSORRT: dict[str, Tag | None] = {
    **dict.fromkeys(("weights", "model", "model_weights", "draft_model", "draft_model_weights"), "weights"),
    "kv_cache": "kv_cache",
    **dict.fromkeys(("sampler", "drafter", "guided_decoder", "spec_resource_manager", "model_extra", "executor_extra")),
    **dict.fromkeys(("_no_capture_init_kv_cache", "_no_capture_init_extra_resources")),
}
"""TensorRT-LLM's names of memory (`ExecutorMemoryType`), and vLLM's `weights`; None for memory that is never released
here."""

Tags = Annotated[
    list[str],
    Query(
        description="Memory to release or restore: weights, kv_cache; all of it if omitted. Repeated, or separated by "
        "commas."
    ),
]


class IsSleeping(BaseModel):
    """Whether the engine sleeps."""

    is_sleeping: bool
    """True until all memory is restored."""


class MemoryTags(BaseModel):
    """The memory to release or restore."""

    tags: list[str] = ["model", "kv_cache"]
    """TensorRT-LLM's names, such as model and kv_cache."""


class MemoryAnswer(BaseModel):
    """Confirmation that the memory was released or restored."""

    status: str = "success"
    """Always success."""


@router.post("/sleep", summary="Release memory", response_class=Response)
async def sleep(
    replica: ReplicaDep,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    mode: Annotated[str, Query(pattern="^(wait|abort)$")] = "abort",
    tags: Tags = [],  # noqa: B006 - FastAPI copies it
) -> Response:
    """Put the engine to sleep, and answer once its memory is released.

    Level 1 keeps weights in memory of the host, level 2 reads them from the model's files again. Mode `abort` ends
    running requests with an error, `wait` lets them finish; new ones get 503. Answers 409 if /wake_up comes first.
    """
    order = SleepOrder(1 if level == 1 else 2, "wait" if mode == "wait" else "abort", _tags_of(tags))
    replica.sleep = await _sleeper(replica).sleep(order)
    return Response()


@router.post("/wake_up", summary="Restore memory", response_class=Response)
async def wake_up(replica: ReplicaDep, tags: Tags = []) -> Response:  # noqa: B006
    """Wake the engine, and answer once it takes requests, or once the memory that `tags` name is there."""
    replica.sleep = await _sleeper(replica).wake_up(_tags_of(tags))
    return Response()


@router.get("/is_sleeping", summary="Whether the engine sleeps")
async def is_sleeping(replica: ReplicaDep) -> IsSleeping:
    """True from the release of memory until all of it is restored."""
    _sleeper(replica)
    return IsSleeping(is_sleeping=bool(replica.sleep.level))


@router.post("/release_memory", summary="Release memory, as with TensorRT-LLM")
async def release_memory(replica: ReplicaDep, body: MemoryTags = MemoryTags()) -> MemoryAnswer:  # noqa: B008
    """Put the engine to sleep at level 1, once running requests have ended."""
    if tags := _of_tensorrt(body.tags):
        replica.sleep = await _sleeper(replica).sleep(SleepOrder(1, "wait", tags))
    return MemoryAnswer()


@router.post("/resume_memory", summary="Restore memory, as with TensorRT-LLM")
async def resume_memory(replica: ReplicaDep, body: MemoryTags = MemoryTags()) -> MemoryAnswer:  # noqa: B008
    """Wake the engine."""
    if tags := _of_tensorrt(body.tags):
        replica.sleep = await _sleeper(replica).wake_up(tags)
    return MemoryAnswer()


def _sleeper(replica: ReplicaState) -> Sleeper:
    if replica.draining:
        raise EngineNotReady("The server is shutting down.")
    if replica.sleeper is None and replica.service is not None:
        raise NotSupported("The engine or encoder of this replica cannot release its memory.")
    if replica.sleeper is None:
        raise EngineNotReady(replica.loading)
    return replica.sleeper


def _tags_of(values: list[str]) -> tuple[Tag, ...]:
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    if unknown := next((name for name in names if name not in TAGS), None):
        raise RequestError(f"There is no memory '{shown(unknown)}': take {' or '.join(TAGS)}.", "tags")
    return tuple(tag for tag in TAGS if tag in names) or TAGS


def _of_tensorrt(names: list[str]) -> tuple[Tag, ...]:
    if unknown := next((name for name in names if name not in _TENSORRT), None):
        raise RequestError(f"There is no memory '{shown(unknown)}': take one of {', '.join(_TENSORRT)}.", "tags")
    meant = {_TENSORRT[name] for name in names}
    return tuple(tag for tag in TAGS if tag in meant)
