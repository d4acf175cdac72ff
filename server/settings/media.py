"""Settings of images: what a request may bring, and where it is encoded. `server/settings/replica.py` makes them part of a replica's."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

from server.settings.types import Names, Urls


class MediaSettings(BaseSettings):
    """Limits of images and of fetching them, the cache of embeddings, and encode replicas."""

    # Images
    max_images: int = Field(32, ge=0, description="Most images in a chat; 0 takes none")
    max_image_mb: float = Field(20.0, gt=0, description="Largest image file in MiB")
    max_image_pixels: int = Field(
        64_000_000, ge=1, description="Largest image in pixels, width times height, of all frames"
    )
    media_timeout_seconds: float = Field(30.0, gt=0, description="How long fetching an image may take")
    media_concurrency: int = Field(16, ge=1, le=1024, description="Images that are fetched at the same time")
    media_allowed_hosts: Names = Field(
        (), description="Comma-separated hosts to fetch images from; empty allows all public ones"
    )
    media_allow_private: bool = Field(False, description="Fetch images from private and loopback addresses too")
    allowed_local_media_path: Path | None = Field(
        None, description="Folder that file:// images may be in; empty allows none"
    )
    embedding_cache_mb: float = Field(
        256.0, ge=0, description="Memory for embeddings of images in MiB, which are then not encoded again"
    )
    image_processor_options: str = Field("", description="JSON object of options for the model's image processor")

    # Encode replicas
    encode_urls: Urls = Field(
        (),
        description="Comma-separated encode replicas that encode images for this one: http://host:port, or dns+http://name:port",
    )
    encode_fallback: Literal["local", "refuse"] = Field(
        "local",
        description="Without an encode replica, this one encodes images itself (local, and loads what that takes) or answers 503",
    )
    encode_attempts: int = Field(
        3, ge=1, description="Most encode replicas that are asked for an image, one after the other"
    )
    encode_inline_kb: int = Field(
        1024,
        ge=0,
        le=1 << 15,
        description="Embeddings of up to so many KiB come within an encode replica's answer, others by transfer",
    )

    @field_validator("allowed_local_media_path", mode="before")
    @classmethod
    def _no_folder(cls, value: object) -> object:
        return None if value == "" else value

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
