"""The bytes of a request's images, which travel beside the request, so that nobody copies them to pack them: in parts
of their own, or not at all, where both sides can read the same memory."""

from collections.abc import Sequence

import msgspec

from engine.encoder import ImageInput
from engine.transfer.shared_bytes import Data
from engine.types import GenerateRequest


def data_of(request: GenerateRequest) -> list[Data]:
    """The bytes themselves: of embeddings, then of files."""
    files = request.media.images if request.media is not None else ()
    return [*(image.data for image in request.images), *files]


def detach(request: GenerateRequest) -> tuple[GenerateRequest, list[Data]]:
    """The request without them, and them, in order."""
    media = request.media
    if not request.images and media is None:
        return request, []
    bare = tuple(msgspec.structs.replace(image, data=b"") for image in request.images)
    if media is not None:
        media = msgspec.structs.replace(media, images=(b"",) * len(media.images))
    return msgspec.structs.replace(request, images=bare, media=media), data_of(request)


def count(request: GenerateRequest) -> int:
    """How many parts `attach` needs."""
    return len(data_of(request))


def attach(request: GenerateRequest, parts: Sequence[Data]) -> GenerateRequest:
    """What `detach` has taken apart. Raises ValueError if they do not belong together."""
    if len(parts) != count(request):
        raise ValueError(f"{count(request)} parts are needed, not {len(parts)}")
    if not parts:
        return request
    images = tuple(
        msgspec.structs.replace(image, data=data) for image, data in zip(request.images, parts, strict=False)
    )
    media = request.media
    if media is not None:
        media = msgspec.structs.replace(media, images=tuple(parts[len(images) :]))
    return msgspec.structs.replace(request, images=images, media=media)


def detach_images(images: Sequence[ImageInput]) -> tuple[list[ImageInput], list[bytes]]:
    """The same of images that are to be encoded."""
    return [msgspec.structs.replace(image, data=b"") for image in images], [image.data for image in images]


def attach_images(images: Sequence[ImageInput], parts: Sequence[bytes]) -> list[ImageInput]:
    """Raises ValueError."""
    if len(parts) != len(images):
        raise ValueError(f"{len(images)} parts are needed, not {len(parts)}")
    return [msgspec.structs.replace(image, data=data) for image, data in zip(images, parts, strict=True)]
