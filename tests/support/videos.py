"""Small video files: a white square that moves to the right over black."""

import tempfile
from pathlib import Path

import cv2
import numpy as np

CODECS = {"mp4": "mp4v", "webm": "VP80", "avi": "MJPG"}


def frames_of(count: int, width: int = 64, height: int = 48) -> list[np.ndarray]:
    """Frames, uint8 RGB: frame `i` has its square at column `2 * i`, and its number as its shade of red."""
    frames = []
    for index in range(count):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[:, :, 0] = 3 * index
        frame[8:24, 2 * index % (width - 16) :][:, :16] = 255
        frames.append(frame)
    return frames


def video_bytes(extension: str = "mp4", count: int = 24, fps: float = 8.0, width: int = 64, height: int = 48) -> bytes:
    return video_of(frames_of(count, width, height), extension, fps)


def video_of(frames: list[np.ndarray], extension: str = "mp4", fps: float = 8.0) -> bytes:
    """A file with these frames, uint8 RGB."""
    height, width, _ = frames[0].shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video.{extension}"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODECS[extension]), fps, (width, height))
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[:, :, ::-1]))
        writer.release()
        return path.read_bytes()
