"""/v1/images: OpenAI's pictures, new ones and changed ones, and the files behind their URLs."""

import asyncio
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from msgspec.structs import replace

from engine import trace
from engine.errors import InvalidRequest
from engine.kit.work import NATIVE
from engine.visual.types import MEDIA_TYPES, VisualDelta, VisualRequest
from multimodal.errors import DeadlineExceeded, InvalidMedia, RequestError
from multimodal.media.sniff import check_image
from protocol.visual import CompletedImage, ImageEditRequest, ImageFields, ImageRequest, ImagesAnswer, PartialImage
from routers.body import json_body, request_body, while_connected
from routers.endpoint import EventStream, NamedEvents
from routers.forms import read_form
from routers.state import Owner, RequestId, State, StateDep, VisualService, VisualServiceDep
from routers.visual.drawing import image_request

PATHS = ("/v1/images/generations", "/v1/images/edits")
BODIES = (ImageRequest, ImageEditRequest)
EVENTS = (PartialImage, CompletedImage)
FILES_PATH = "/v1/images/files"
_PATCH = 16 * 16
"""Pixels that usage counts as a token."""


class ImageEvents(NamedEvents):
    """Events of a picture during its generation; an error has a type, too."""

    def event(self, payload: bytes) -> bytes:
        if payload.startswith(b'{"error"'):
            payload = b'{"type":"error",' + payload[1:]
        return super().event(payload)


FRAMING = ImageEvents()
router = APIRouter(tags=["pictures and videos"])


@router.post(
    PATHS[0],
    response_model=ImagesAnswer,
    summary="Make pictures",
    openapi_extra=request_body(ImageRequest),
)
async def generate(
    request: Request,
    state: StateDep,
    service: VisualServiceDep,
    owner: Owner,
    request_id: RequestId,
    body: Annotated[ImageRequest, Depends(json_body(ImageRequest))],
) -> Response:
    """Make pictures of a prompt. With `stream` one comes as server-sent events, unfinished ones before it."""
    service.fields.check(body)
    asked = image_request(body, service.engine.info, service.limits, request_id)
    if body.stream:
        return _stream(state, _events(service, body, asked, "image_generation"))
    return await while_connected(request, _answer(request, service, owner, body, asked))


@router.post(
    PATHS[1],
    response_model=ImagesAnswer,
    summary="Change a picture",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data": {"schema": {"$ref": "#/components/schemas/ImageEditRequest"}}},
        }
    },
)
async def edit(
    request: Request, state: StateDep, service: VisualServiceDep, owner: Owner, request_id: RequestId
) -> Response:
    """Change a picture, or the part of it that is transparent in a mask, as a prompt says."""
    form = await read_form(request)
    body = form.parsed(ImageEditRequest)
    service.fields.check(body)
    info = service.engine.info
    image, mask = form.file("image"), form.file("mask")
    if image is None:
        raise RequestError("'image' must be a file of the form.", "image")
    if not info.edits or (mask is not None and not info.inpaints):
        what = "image" if not info.edits else "mask"
        raise RequestError(
            f"The pipeline of this model, {info.pipeline}, cannot change pictures"
            f"{'' if what == 'image' else ' by a mask'}.",
            what,
            "unsupported_parameter",
        )
    size = checked(image, "image", service)
    if mask is not None and checked(mask, "mask", service) != size:
        raise RequestError("'mask' must be as large as 'image'.", "mask")
    asked = image_request(body, info, service.limits, request_id, size)
    asked = replace(asked, image=bytes(image), mask=bytes(mask or b""))
    if body.stream:
        return _stream(state, _events(service, body, asked, "image_edit", size))
    return await while_connected(request, _answer(request, service, owner, body, asked, size))


@router.get(f"{FILES_PATH}/{{name}}", summary="Download a picture", response_class=Response)
async def file(service: VisualServiceDep, owner: Owner, name: str) -> Response:
    """The file behind a URL of an answer."""
    found = await service.media.get(owner, name)
    kind = MEDIA_TYPES[found.path.suffix[1:]]
    return FileResponse(
        found.path, media_type=kind, headers={"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}
    )


async def made(service: VisualService, asked: VisualRequest) -> list[VisualDelta]:
    """Return the files of a request, in the order of its seeds. Raises what the engine raises, with the names that
    fields have in bodies, and DeadlineExceeded.
    """
    async with aclosing(_news(service, asked)) as news:
        files = [delta async for delta in news if delta.stage == "file"]
    return sorted(files, key=lambda delta: delta.index)


async def _news(service: VisualService, asked: VisualRequest) -> AsyncGenerator[VisualDelta]:
    """Yield the engine's reports. Raises DeadlineExceeded once the request has taken too long."""
    attributes = {"trellis.pictures": len(asked.seeds), "trellis.steps": asked.steps, "trellis.frames": asked.frames}
    deadline = asyncio.get_running_loop().time() + service.timeout_seconds
    with trace.span("generate", attributes):
        async with aclosing(service.engine.generate(asked)) as news:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        delta = await anext(news, None)
                except TimeoutError:
                    raise DeadlineExceeded(service.timeout_seconds) from None
                if delta is None:
                    return
                yield delta


def _stream(state: State, events: AsyncGenerator[bytes]) -> EventStream:
    return EventStream(events, FRAMING, state["http"].ping_interval, state["render_error"])


async def _events(
    service: VisualService, body: ImageFields, asked: VisualRequest, kind: str, edited: tuple[int, int] = (0, 0)
) -> AsyncGenerator[bytes]:
    """Yield the events of a stream: previews, then the picture."""
    shown = 0
    async with aclosing(_news(service, asked)) as news:
        async for delta in news:
            if delta.stage not in ("preview", "file"):
                continue
            event: dict[str, Any] = {"type": f"{kind}.completed"}
            if delta.stage == "preview":
                event = {"type": f"{kind}.partial_image", "partial_image_index": shown}
                shown += 1
            event |= _facts(asked) | {"created_at": int(time.time()), "seed": asked.seeds[0]}
            event |= {"quality": body.quality or "auto"}
            if delta.stage == "file":
                event["usage"] = _usage(asked, [delta], edited)
            yield await NATIVE.run(partial(_with_file, event, delta.data))


def _with_file(event: dict[str, Any], data: bytes) -> bytes:
    return orjson.dumps(event | {"b64_json": b64encode(data).decode()})


async def _answer(
    request: Request,
    service: VisualService,
    owner: str,
    body: ImageFields,
    asked: VisualRequest,
    edited: tuple[int, int] = (0, 0),
) -> Response:
    files = await made(service, asked)
    if body.response_format == "url":
        stored = [await service.media.put(owner, found.data, asked.format) for found in files]
        places: Sequence[dict[str, Any]] = [
            {"url": f"{request.base_url}{FILES_PATH[1:]}/{found.name}"} for found in stored
        ]
        content = orjson.dumps(_described(asked, files, places, edited))
    else:
        content = await NATIVE.run(
            lambda: orjson.dumps(
                _described(asked, files, [{"b64_json": b64encode(found.data).decode()} for found in files], edited)
            )
        )
    return Response(content, media_type="application/json")


def _described(
    asked: VisualRequest, files: Sequence[VisualDelta], places: Sequence[dict[str, Any]], edited: tuple[int, int]
) -> dict[str, Any]:
    return {
        "created": int(time.time()),
        "data": [
            place | {"revised_prompt": None, "seed": seed} for place, seed in zip(places, asked.seeds, strict=True)
        ],
        **_facts(asked),
        "usage": _usage(asked, files, edited),
    }


def _facts(asked: VisualRequest) -> dict[str, str]:
    return {"background": "opaque", "output_format": asked.format, "size": f"{asked.width}x{asked.height}"}


def _usage(asked: VisualRequest, files: Sequence[VisualDelta], edited: tuple[int, int]) -> dict[str, Any]:
    text, image = max(found.prompt_tokens for found in files), edited[0] * edited[1] // _PATCH
    patches = len(files) * asked.width * asked.height // _PATCH
    return {
        "input_tokens": text + image,
        "input_tokens_details": {"text_tokens": text, "image_tokens": image},
        "output_tokens": patches,
        "total_tokens": text + image + patches,
    }


def checked(data: memoryview, field: str, service: VisualService) -> tuple[int, int]:
    """Return the size of a picture by its header. Raises MediaError."""
    limits = service.limits
    if len(data) > limits.max_image_bytes:
        raise InvalidMedia(f"'{field}' has more than {limits.max_image_bytes} bytes (MAX_IMAGE_MB).", field)
    try:
        return check_image(bytes(data), limits.max_image_pixels)
    except InvalidRequest as error:
        raise error.at(field) from None
