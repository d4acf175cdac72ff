"""Settings of images: what a request may contain, and where images are encoded."""

import json
from typing import Literal

from pydantic import Field, field_validator

from multimodal.media.limits import MAX_REQUEST_PIXELS, MediaLimits
from server.settings.types import Names, PathOrNone, Section, Urls


class MediaSettings(Section):
    """Limits of images and of fetching them, and the cache of embeddings."""

    group = "Images"

    max_images: int = Field(32, ge=0)
    """Maximum number of images in a chat; 0 refuses images."""
    max_image_mb: float = Field(MediaLimits.max_image_bytes / (1 << 20), gt=0)
    """Maximum size of an image file in MiB."""
    max_image_pixels: int = Field(MediaLimits.max_image_pixels, ge=1)
    """Maximum size of an image in pixels: width times height, of all its frames."""
    max_request_pixels: int = Field(MAX_REQUEST_PIXELS, ge=1)
    """Maximum size of all images of a chat in pixels; at least one image of MAX_IMAGE_PIXELS is always taken."""
    media_timeout_seconds: float = Field(MediaLimits.timeout_seconds, gt=0)
    """Seconds that fetching an image may take; one that comes at less than 4 KiB a second is given up after 5."""
    media_concurrency: int = Field(MediaLimits.concurrency, ge=1, le=1024)
    """Maximum number of images that an API process fetches at the same time; of one request, and from one host, a
    quarter.
    """
    media_allowed_hosts: Names = MediaLimits.allowed_hosts
    """Comma-separated hosts to fetch images from; empty allows all public hosts."""
    media_allow_private: bool = MediaLimits.allow_private
    """Also fetch images from private and loopback addresses."""
    allowed_local_media_path: PathOrNone = MediaLimits.local_folder
    """Folder that file:// images may be in; empty allows none."""
    embedding_cache_mb: float = Field(256.0, ge=0)
    """Memory of each API process for the embeddings of images in MiB; a cached image is not encoded again."""
    image_processor_options: str = ""
    """JSON object with options for the model's image processor."""

    max_transcription_seconds: float = Field(7200.0, gt=0)
    """Maximum length of an audio file to transcribe, in seconds; MAX_BODY_MB bounds its bytes. While it is transcribed,
    a second takes 32 or 51 KB of memory.
    """

    @field_validator("image_processor_options", mode="after")
    @classmethod
    def _json_object(cls, value: str) -> str:
        try:
            valid = isinstance(json.loads(value or "{}"), dict)
        except ValueError:
            valid = False
        if not valid:
            raise ValueError("must be a JSON object")
        return value


class EncodeSettings(Section):
    """Encode replicas, which encode images for this one."""

    group = "Encode replicas"

    encode_urls: Urls = ()
    """Comma-separated encode replicas that encode images for this one: http://host:port, or dns+http://name:port."""
    encode_fallback: Literal["local", "refuse"] = "local"
    """When no encode replica answers: local encodes images here (and loads the encoder), refuse answers 503."""
    encode_attempts: int = Field(3, ge=1)
    """Maximum number of encode replicas tried for an image, one after another."""
    encode_inline_kb: int = Field(1024, ge=0, le=1 << 15)
    """Maximum size in KiB of embeddings sent in an encode replica's answer; larger ones are read by transfer."""
