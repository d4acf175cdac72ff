"""/v1/videos: OpenAI's video jobs, and a route that answers with the file."""

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from msgspec.structs import replace

from engine.media import MediaInput
from engine.visual.types import MEDIA_TYPES, VisualRequest
from multimodal.errors import RequestError
from protocol.visual import DeletedVideo, VideoError, VideoJob, VideoPage, VideoRequest
from routers.body import json_body, while_connected
from routers.forms import is_form, read_form
from routers.state import Owner, ReplicaDep, RequestId, VisualService, VisualServiceDep
from routers.visual.drawing import video_request
from routers.visual.images import checked, made
from routers.visual.jobs import VideoRecord
from routers.visual.media import no_file

PATH = "/v1/videos"
SYNC_PATH = f"{PATH}/generations"
BODIES = (VideoRequest,)
_ONE = f"{PATH}/{{video_id}}"
_FORMAT = "webm"
_REFERENCE = "input_reference"
_SCHEMA = {"schema": {"$ref": "#/components/schemas/VideoRequest"}}
_BODY = {"requestBody": {"required": True, "content": {"application/json": _SCHEMA, "multipart/form-data": _SCHEMA}}}

router = APIRouter(tags=["pictures and videos"])
_json = json_body(VideoRequest)


async def _asked(request: Request, service: VisualService, request_id: str) -> VisualRequest:
    """Return the request in a body, JSON or a form. Raises RequestError."""
    file = None
    if is_form(request):
        form = await read_form(request)
        file = form.file(_REFERENCE)
        body = form.parsed(VideoRequest)
    else:
        body = await _json(request)
    service.fields.check(body)
    asked = video_request(body, service.engine.info, service.limits, request_id)
    return replace(asked, image=await _image(body, file, service))


async def _image(body: VideoRequest, file: memoryview | None, service: VisualService) -> bytes:
    """Return the picture with which a video begins; empty for none. Raises RequestError."""
    info, given = service.engine.info, body.input_reference
    if file is None and given is None:
        if info.needs_image:
            raise RequestError(
                f"'{_REFERENCE}': the pipeline {info.pipeline} needs a picture to begin with.", _REFERENCE
            )
        return b""
    if not info.animates:
        text = f"'{_REFERENCE}': the pipeline {info.pipeline} makes videos of prompts alone."
        raise RequestError(text, _REFERENCE, "unsupported_parameter")
    if file is not None:
        checked(file, _REFERENCE, service)
        return bytes(file)
    assert given is not None
    if given.file_id is not None:
        raise RequestError(
            f"'{_REFERENCE}': files are not stored here; 'image_url' may be a data URL.",
            _REFERENCE,
            "unsupported_parameter",
        )
    if not given.image_url:
        raise RequestError(f"'{_REFERENCE}' must have an 'image_url'.", _REFERENCE)
    loaded = await service.loader.load(given.image_url, _REFERENCE)
    assert isinstance(loaded, MediaInput), "a loader without a hidden size takes no embeddings"
    return bytes(loaded.data)


@router.post(PATH, status_code=202, summary="Ask for a video", openapi_extra=_BODY)
async def create(
    request: Request, replica: ReplicaDep, service: VisualServiceDep, owner: Owner, request_id: RequestId
) -> VideoJob:
    """Begin a job that makes a video. Poll the job until it has completed, then get its content."""
    asked = await _asked(request, service, request_id)
    return _shown(await service.videos.create(owner, asked), service, replica.model_name)


@router.post(SYNC_PATH, summary="Make a video", openapi_extra=_BODY, response_class=Response)
async def generate(request: Request, service: VisualServiceDep, request_id: RequestId) -> Response:
    """Make a video, and answer with its file. It is aborted when the connection closes."""
    asked = await _asked(request, service, request_id)
    (found,) = await while_connected(request, made(service, asked))
    return Response(found.data, media_type=MEDIA_TYPES[_FORMAT], headers={"X-Trellis-Seed": str(asked.seeds[0])})


@router.get(PATH, summary="List videos")
async def videos(
    replica: ReplicaDep,
    service: VisualServiceDep,
    owner: Owner,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> VideoPage:
    """The jobs of this key, the newest first."""
    found, more = await service.videos.page(owner, limit, after, order == "asc")
    data = [_shown(record, service, replica.model_name) for record in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return VideoPage(data=data, first_id=first, last_id=last, has_more=more)


@router.get(_ONE, summary="Look at a video")
async def video(replica: ReplicaDep, service: VisualServiceDep, owner: Owner, video_id: str) -> VideoJob:
    """A job and its progress."""
    return _shown(await service.videos.get(owner, video_id), service, replica.model_name)


@router.get(f"{_ONE}/content", summary="Download a video", response_class=Response)
async def content(
    service: VisualServiceDep, owner: Owner, video_id: str, variant: Literal["video"] = "video"
) -> Response:
    """The file of a job that has completed. It may be asked for in ranges."""
    record = await service.videos.get(owner, video_id)
    if record.state != "completed":
        raise RequestError(f"The video is not there: the job is {record.state}.", "video_id", "video_not_ready")
    if record.file is None:
        raise no_file(video_id)
    found = await service.media.get(owner, record.file)
    headers = {"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}
    return FileResponse(found.path, media_type=MEDIA_TYPES[_FORMAT], headers=headers)


@router.post(f"{_ONE}/cancel", summary="Cancel a video")
async def cancel(replica: ReplicaDep, service: VisualServiceDep, owner: Owner, video_id: str) -> VideoJob:
    """Cancel a job that has not ended, before its next step."""
    return _shown(await service.videos.cancel(owner, video_id), service, replica.model_name)


@router.delete(_ONE, summary="Delete a video")
async def delete(service: VisualServiceDep, owner: Owner, video_id: str) -> DeletedVideo:
    """Delete a job and its file. One that has not ended is cancelled."""
    await service.videos.delete(owner, video_id)
    return DeletedVideo(id=video_id)


def _shown(record: VideoRecord, service: VisualService, model: str) -> VideoJob:
    asked = record.request
    error: dict[str, Any] = orjson.loads(record.error)["error"] if record.error is not None else {}
    kept = record.ended + service.media.max_seconds if record.ended is not None and record.file is not None else None
    return VideoJob(
        id=record.id,
        model=model,
        status=record.state,
        stage="postprocessing" if record.stage == "postprocessing" else "generating" if record.stage else None,
        progress=record.progress,
        created_at=int(record.created),
        completed_at=None if record.ended is None else int(record.ended),
        expires_at=None if kept is None else int(kept),
        prompt=asked.prompt,
        size=f"{asked.width}x{asked.height}",
        seconds=f"{asked.frames / asked.fps:g}",
        seed=asked.seeds[0],
        num_frames=asked.frames,
        error=VideoError(**(error | {"code": error["code"] or error["type"]})) if error else None,
    )
