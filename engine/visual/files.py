"""Files of pixels: PNG, WebP and JPEG pictures by Pillow, VP9 videos in WebM by PyAV (software; H200s have no encoder).

Both release the GIL while they encode.
"""

import io
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from PIL import Image

from engine.visual.types import VisualRequest

_BEST_CRF, _WORST_CRF = 15, 55
"""Constant rate factors of libvpx-vp9 for the qualities 100 and 0."""


def encode(pixels: Any, request: VisualRequest, going_on: Callable[[], bool]) -> bytes:
    """Return the file of [frames, height, width, 3] bytes, in the format of its request. Ends early, with what there
    is, once `going_on` says no.
    """
    if request.format == "webm":
        return encode_video(pixels, request.fps, request.quality, going_on)
    return encode_image(pixels[0], request.format, request.quality)


def encode_image(pixels: Any, format_: str, quality: int) -> bytes:
    """Return the file of [height, width, 3] bytes."""
    file = io.BytesIO()
    options = {} if format_ == "png" else {"quality": max(1, quality)}
    Image.fromarray(pixels).save(file, format_.upper(), **options)
    return file.getvalue()


def encode_video(frames: Any, fps: float, quality: int, going_on: Callable[[], bool]) -> bytes:
    """Return a WebM file with VP9."""
    import av  # noqa: PLC0415 - an extra, and slow to import

    file = io.BytesIO()
    height, width = frames.shape[1:3]
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libvpx-vp9", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        crf = round(_WORST_CRF - (_WORST_CRF - _BEST_CRF) * quality / 100)
        stream.options = {"crf": str(crf), "b": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"}
        for number, frame in enumerate(frames):
            if number and not going_on():
                break
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
