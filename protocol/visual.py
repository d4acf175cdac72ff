"""/v1/images and /v1/videos: OpenAI's pictures and videos, and our extensions, as TensorRT-LLM spells them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import Finite, Int64, LongUrl, ModelFields, Wire

MAX_PROMPT = 32_000
"""Characters, as OpenAI has it."""
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
Percent = Annotated[int, Field(ge=0, le=100)]


class DrawingFields(ModelFields):
    """Fields that pictures and videos share."""

    prompt: Prompt
    """Description of the picture or video. Example: "a red circle on a white background" """
    size: str | None = None
    """Width and height in pixels; `auto` is the model's own. Example: "512x512" """
    seed: Int64 | None = None
    """The same seed, prompt and parameters give the same picture. Without, each is another. Example: 7"""
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    """Denoising steps. Example: 20"""
    guidance_scale: Annotated[Finite, Field(ge=0, le=100)] | None = None
    """Strength of classifier-free guidance: higher values follow the prompt more closely. Example: 5.0"""
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    """Description of contents to avoid. Example: "blurry" """
    user: Any = None
    """Accepted and ignored. Example: "user-1" """


class ImageFields(DrawingFields):
    """Fields that new and changed pictures share."""

    n: Annotated[int, Field(ge=1)] | None = None
    """Number of pictures. Those after the first have the seeds that follow. Example: 1"""
    response_format: Literal["b64_json", "url"] | None = None
    """Whether the answer has the files, or URLs of this server, which keeps them for a while.
    Example: "b64_json" """
    output_format: Literal["png", "webp", "jpeg"] | None = None
    """Format of the files. Example: "png" """
    output_compression: Percent | None = None
    """Quality of WebP and JPEG; 100 is the best. Example: 90"""
    quality: Literal["auto", "standard", "low", "medium", "high", "hd"] | None = None
    """Steps, if `num_inference_steps` names none: `low` takes half of the model's, `high` and `hd` half as many more.
    Example: "auto" """
    background: Literal["auto", "opaque"] | None = None
    """Accepted and ignored: pictures are opaque. Example: "auto" """
    moderation: Any = None
    """Accepted and ignored. Example: "auto" """
    style: Any = None
    """Accepted and ignored. Example: "vivid" """
    stream: bool | None = None
    """Send the picture, and before it unfinished ones, as server-sent events. Needs `n` of 1. Example: false"""
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = None
    """Maximum number of unfinished pictures in a stream; each has to be decoded like a picture. Example: 2"""


class ImageRequest(ImageFields):
    """New pictures of a prompt."""


class ImageEditRequest(ImageFields):
    """Changed pictures, as a form whose file `image` is to be changed: all of it, or what is transparent in the file
    `mask`."""

    strength: Annotated[Finite, Field(gt=0, le=1)] | None = None
    """Strength of the change; 1 keeps nothing of the picture. Example: 0.8"""
    input_fidelity: Any = None
    """Accepted and ignored. Example: "low" """


class InputReference(Wire):
    """A picture with which a video begins."""

    image_url: LongUrl | None = None
    """A data URL, or an http(s) URL. Example: "data:image/png;base64,iVBORw0KGgo=" """
    file_id: Any = None
    """Not supported."""


class VideoRequest(DrawingFields):
    """A video of a prompt."""

    input_reference: InputReference | None = None
    """The picture with which the video begins, for models that take one; in a form, a file.
    Example: {"image_url": "data:image/png;base64,iVBORw0KGgo="}"""

    seconds: Annotated[Finite, Field(gt=0)] | str | None = None
    """Length, as a number or as text. Example: "2" """
    fps: Annotated[Finite, Field(ge=1, le=120)] | None = None
    """Frames per second. Example: 8"""
    num_frames: Annotated[int, Field(ge=1)] | None = None
    """Number of frames, in place of `seconds`. Example: 16"""
    output_compression: Percent | None = None
    """Quality of the file; 100 is the best. Example: 70"""


class Image(BaseModel):
    """A picture."""

    b64_json: str | None = None
    """The file in base64."""
    url: str | None = None
    """URL of the file, which only the API key of the request can read."""
    revised_prompt: str | None = None
    """Always null: prompts are taken as they are."""
    seed: int
    """The seed that gives this picture again, an extension."""


class ImageTokenDetails(BaseModel):
    """Parts of `input_tokens`."""

    text_tokens: int
    """Tokens of the prompt."""
    image_tokens: int
    """Patches of the picture to change."""


class ImageUsage(BaseModel):
    """Tokens and patches that were read and made."""

    input_tokens: int
    """Tokens of the prompt, and patches of the picture to change."""
    input_tokens_details: ImageTokenDetails
    """Parts of `input_tokens`."""
    output_tokens: int
    """Patches of 16 by 16 pixels of all pictures."""
    total_tokens: int
    """The sum of both."""


class ImagesAnswer(BaseModel):
    """Pictures."""

    created: int
    """Unix time in seconds."""
    background: Literal["opaque"] = "opaque"
    """Pictures are opaque."""
    data: list[Image]
    """The pictures."""
    output_format: Literal["png", "webp", "jpeg"]
    """Format of the files."""
    size: str
    """Width and height in pixels."""
    usage: ImageUsage
    """Tokens and patches that were read and made."""


class _ImageEvent(BaseModel):
    """Fields of both events of a stream."""

    type: str
    """Kind of event."""
    b64_json: str
    """The file in base64."""
    created_at: int
    """Unix time in seconds."""
    background: Literal["opaque"] = "opaque"
    """Pictures are opaque."""
    output_format: Literal["png", "webp", "jpeg"]
    """Format of the file."""
    quality: str
    """As asked for."""
    size: str
    """Width and height in pixels."""
    seed: int
    """The seed of the picture, an extension."""


class PartialImage(_ImageEvent):
    """An event of a stream: an unfinished picture."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    """Kind of event."""
    partial_image_index: int
    """Which unfinished picture it is, from 0."""


class CompletedImage(_ImageEvent):
    """The last event of a stream: the picture."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    """Kind of event."""
    usage: ImageUsage
    """Tokens and patches of the picture."""


class VideoError(BaseModel):
    """The error of a failed video."""

    code: str
    """Code for programs."""
    message: str
    """Message for people."""
    param: str | None = None
    """The field at fault."""
    type: str | None = None
    """Kind of error."""


VideoStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


class VideoJob(BaseModel):
    """A video that is asked for, and how far it is."""

    id: str
    """Id of the job."""
    object: Literal["video"] = "video"
    """Kind of this object."""
    model: str
    """Name of the model."""
    status: VideoStatus
    """State of the job."""
    stage: Literal["generating", "postprocessing"] | None = None
    """Stage of a job in progress, an extension: frames are computed, or written to a file."""
    progress: int
    """Percent of the work that is done."""
    created_at: int
    """Unix time in seconds."""
    completed_at: int | None = None
    """Unix time in seconds at which it ended."""
    expires_at: int | None = None
    """Unix time in seconds until which the file is kept."""
    prompt: str
    """The prompt."""
    size: str
    """Width and height in pixels."""
    seconds: str
    """Length."""
    seed: int
    """The seed that gives this video again, an extension."""
    num_frames: int
    """Number of frames, an extension."""
    error: VideoError | None = None
    """Reason why it has failed."""
    remixed_from_video_id: str | None = None
    """Always null."""


class VideoPage(BaseModel):
    """Jobs."""

    object: Literal["list"] = "list"
    """Kind of this object."""
    data: list[VideoJob]
    """The jobs."""
    first_id: str | None
    """Id of the first."""
    last_id: str | None
    """Id of the last; `after` this come the next."""
    has_more: bool
    """Whether there are more."""


class DeletedVideo(BaseModel):
    """A job that is gone."""

    id: str
    """Id of the job."""
    object: Literal["video.deleted"] = "video.deleted"
    """Kind of this object."""
    deleted: Literal[True] = True
    """It is deleted."""
