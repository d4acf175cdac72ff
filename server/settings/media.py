"""Settings of media: what a request may contain, and where images are encoded."""

from typing import Literal

from pydantic import Field

from engine.config import VideoOptions
from multimodal.media.limits import MAX_AUDIOS, MAX_REQUEST_PIXELS, MAX_VIDEOS, MediaLimits
from server.settings.types import EMBEDDED, JsonObject, Names, PathOrNone, Section, Urls

VIDEOS = VideoOptions()


class MediaSettings(Section):
    """Limits of images, videos and audio and of fetching them, and the cache of embeddings."""

    group = "Images, videos and audio"

    max_images: int = Field(32, ge=0)
    """Maximum number of images in a chat; 0 refuses images."""
    max_image_mb: float = Field(MediaLimits.max_image_bytes / (1 << 20), gt=0)
    """Maximum size of an image file in MiB."""
    max_image_pixels: int = Field(MediaLimits.max_image_pixels, ge=1)
    """Maximum size of an image in pixels: width times height, of all its frames."""
    max_request_pixels: int = Field(MAX_REQUEST_PIXELS, ge=1)
    """Maximum size of all images of a chat in pixels; at least one image of MAX_IMAGE_PIXELS is always taken."""
    max_videos: int = Field(MAX_VIDEOS, ge=0)
    """Maximum number of videos in a chat; 0 refuses videos."""
    max_video_mb: float = Field(MediaLimits.max_video_bytes / (1 << 20), gt=0)
    """Maximum size of a video file in MiB."""
    max_video_seconds: float = Field(VIDEOS.max_seconds, gt=0)
    """Maximum length of a video in seconds, by the number of its frames."""
    max_video_pixels: int = Field(VIDEOS.max_pixels, ge=1)
    """Maximum size of a video's frames in pixels: width times height."""
    max_video_frames: int = Field(VIDEOS.max_frames, ge=1, le=999)
    """Maximum number of frames that are taken of a video."""
    video_fps: float = Field(VIDEOS.sampling.fps, ge=0)
    """Frames that are taken of each second of a video, if the request does not say; 0 leaves it to the model's files,
    or takes two."""
    video_num_frames: int = Field(VIDEOS.sampling.num_frames, ge=0)
    """Number of frames taken of a video if the request does not say; with VIDEO_FPS, the maximum number."""
    max_audios: int = Field(MAX_AUDIOS, ge=0)
    """Maximum number of recordings in a chat; 0 refuses audio."""
    max_audio_mb: float = Field(MediaLimits.max_audio_bytes / (1 << 20), gt=0)
    """Maximum size of an audio file in MiB."""
    max_audio_seconds: float = Field(MediaLimits.max_audio_seconds, gt=0)
    """Maximum length of a recording in a chat, in seconds."""
    media_timeout_seconds: float = Field(MediaLimits.timeout_seconds, gt=0)
    """Seconds that fetching a file may take; one that comes at less than 4 KiB a second is given up after 5."""
    media_concurrency: int = Field(MediaLimits.concurrency, ge=1, le=1024)
    """Maximum number of files that an API process fetches at the same time; of one request, and from one host, a
    quarter.
    """
    media_allowed_hosts: Names = MediaLimits.allowed_hosts
    """Comma-separated hosts to fetch media from; empty allows all public hosts."""
    media_allow_private: bool = MediaLimits.allow_private
    """Also fetch media from private and loopback addresses."""
    allowed_local_media_path: PathOrNone = MediaLimits.local_folder
    """Folder that file:// media may be in; empty allows none."""
    embedding_cache_mb: float = Field(256.0, ge=0)
    """Memory of each API process for the embeddings of media in MiB; a cached file is not encoded again."""
    image_processor_options: JsonObject = ""
    """JSON object with options for the model's image processor."""

    max_transcription_seconds: float = Field(7200.0, gt=0)
    """Maximum length of an audio file to transcribe, in seconds; MAX_BODY_MB bounds its bytes. While it is transcribed,
    a second takes 32 or 51 KB of memory.
    """


class EncodeSettings(Section):
    """Encode replicas, which encode images for this one."""

    group = "Encode replicas"

    encode_urls: Urls = ()
    """Comma-separated encode replicas that encode images for this one: http://host:port, or dns+http://name:port."""
    encode_fallback: Literal["local", "refuse"] = "local"
    """Fallback when no encode replica answers: local encodes images here (and loads the encoder), refuse answers
    503."""
    encode_attempts: int = Field(3, ge=1)
    """Maximum number of encode replicas tried for an image, one after another."""
    encode_inline_kb: int = Field(1024, ge=0, le=1 << 15)
    """Maximum size in KiB of embeddings sent in an encode replica's answer; larger ones are read by transfer."""
    embedding_transfer: Literal["auto", "direct", "front"] = "auto"
    """Way of embeddings from encode replicas of this host: direct leaves them with the encoder, where engines read them
    by CUDA IPC from a GPU and by shared memory on a CPU; front takes them through the replica that asked. auto is
    direct on GPUs. Encode replicas and the replicas that ask them both have to allow it.
    """
    embedding_memory_mb: int = Field(EMBEDDED.embedding_memory_mb, ge=1)
    """Memory in MiB for embeddings that stay with an encode replica's encoder, on its device; an engine that reads such
    embeddings takes as much of the host's memory.
    """
