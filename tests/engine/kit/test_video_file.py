"""Frames of video files, chosen as transformers and vLLM choose them; files that lie, or are broken, stay bounded."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import VideoOptions
from engine.errors import InvalidRequest
from engine.kit import video_file
from engine.kit.video_file import VideoFile, as_qwen, as_smolvlm, evenly
from engine.kit.video_text import spelled, video_text
from engine.media import FrameSampling, MediaInput
from tests.support.videos import frames_of, video_bytes

AVI = video_bytes("avi")


def opened(data: bytes, **options: float) -> VideoFile:
    return VideoFile(MediaInput(data, kind="video"), VideoOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("extension", ["mp4", "webm", "avi"])
def test_the_frames_are_those_that_were_written(extension: str) -> None:
    file = opened(video_bytes(extension))
    assert (file.total, file.fps, file.seconds) == (24, 8.0, 3.0)
    found = list(file.frames([0, 5, 23]))
    assert [index for index, _ in found] == [0, 5, 23]
    for index, frame in found:
        wanted = frames_of(24)[index]
        assert frame.shape == wanted.shape and np.abs(frame.astype(int) - wanted).mean() < 12


def test_a_file_that_was_closed_is_opened_again() -> None:
    file = opened(AVI)
    whole = [frame for _, frame in file.frames([0, 5, 23])]
    file = opened(AVI)
    file.close()
    assert all(np.array_equal(one, frame) for one, (_, frame) in zip(whole, file.frames([0, 5, 23]), strict=True))


def test_turns_of_others_do_not_count_as_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(video_file.time, "monotonic", lambda: now)

    def others() -> bool:
        nonlocal now
        now += 100.0
        return True

    file = VideoFile(MediaInput(AVI, kind="video"), VideoOptions(decode_seconds=1.0), others)
    assert len(list(file.frames(range(24)))) == 24 and now >= 2400.0


def claiming(count: int) -> bytes:
    """An AVI file whose headers say that it has `count` frames."""
    data = bytearray(AVI)
    struct.pack_into("<I", data, data.index(b"avih") + 8 + 16, count)
    struct.pack_into("<I", data, data.index(b"strh") + 8 + 32, count)
    return bytes(data)


def test_a_video_that_claims_a_million_frames() -> None:
    with pytest.raises(InvalidRequest, match="125000 seconds, 1000000 frames; the most is 600 seconds") as caught:
        opened(claiming(1_000_000))
    assert caught.value.param == "video"
    file = opened(claiming(1_000_000), max_seconds=1e9)
    assert [index for index, _ in file.frames(evenly(file.total, file.fps, FrameSampling(num_frames=8)))] == [0]


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (AVI, {"max_pixels": 64 * 48 - 1}, "64 x 48, have more than 3071 pixels"),
        (AVI, {"max_seconds": 2.9}, "has 3 seconds"),
        (AVI, {"decode_seconds": 0.0}, "longer than 0 seconds to decode"),
        (AVI[:200], {}, "cannot be read"),
        (b"RIFF\0\0\0\0AVI ", {}, "cannot be read"),
    ],
)
def test_refusals(data: bytes, options: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        list(opened(data, **options).frames([20]))


def test_frames_of_several_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([48, 50])
    monkeypatch.setattr(VideoFile, "_frame", lambda self: np.zeros((next(sizes), 64, 3), np.uint8))
    with pytest.raises(InvalidRequest, match="differ in size"):
        list(opened(AVI).frames([0, 1]))


def test_waiting_for_its_turn_is_not_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(video_file, "time", SimpleNamespace(monotonic=lambda: now))
    file = opened(AVI)
    now = 100.0
    frames = file.frames([0, 20])
    assert next(frames)[0] == 0
    now = 200.0
    with pytest.raises(InvalidRequest, match="longer than 30 seconds to decode"):
        next(frames)


def test_decoding_ends_once_nobody_waits() -> None:
    looks = iter([True, True, False])
    frames = VideoFile(MediaInput(AVI, kind="video"), VideoOptions(), lambda: next(looks)).frames([0, 1, 2])
    assert [next(frames)[0], next(frames)[0]] == [0, 1]
    with pytest.raises(InvalidRequest, match="nobody waits"):
        next(frames)


def test_corrupt_frames_are_skipped() -> None:
    data = bytearray(AVI)
    second = data.index(b"00dc", data.index(b"00dc") + 4)
    data[second + 8 : second + 200] = bytes(192)
    assert len(list(opened(bytes(data)).frames(range(20)))) >= 18
    assert len(list(opened(AVI[: len(AVI) // 2]).frames(range(24)))) in range(2, 16)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, len(AVI) - 1), st.integers(0, 255)), max_size=30))
def test_damaged_files_are_read_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(AVI)
    for place, value in changes:
        data[place] = value
    try:
        found = list(opened(bytes(data), max_seconds=60, decode_seconds=5).frames([0, 12, 23]))
    except InvalidRequest:
        return
    assert 1 <= len(found) <= 3 and all(frame.shape[2] == 3 for _, frame in found)


def test_which_frames_are_taken() -> None:
    assert evenly(100, 25.0, FrameSampling(num_frames=5)) == [0, 24, 49, 74, 99]
    assert evenly(100, 25.0, FrameSampling(1.0, 64)) == [0, 33, 66, 99]
    assert evenly(3, 25.0, FrameSampling(num_frames=8)) == [0, 1, 2]
    assert as_smolvlm(64, 8.0, FrameSampling(2.0, 8)) == [0, 9, 18, 27, 36, 45, 54, 63]
    assert as_smolvlm(1000, 10.0, FrameSampling(1.0, 4)) == [10, 336, 663, 990]  # without its first and last second
    assert as_qwen(64, 8.0, FrameSampling(2.0, 64)) == [*range(0, 64, 4)]
    assert as_qwen(64, 8.0, FrameSampling(0.1, 64)) == [0, 16, 32, 48]
    assert as_qwen(64, 8.0, FrameSampling(num_frames=3)) == [0, 16, 32, 48]
    assert as_qwen(1, 8.0, FrameSampling(2.0, 64)) == [0]


def test_how_a_video_is_written() -> None:
    assert video_text("F", [0.0, 1.5, 61.2], 61.9) == (
        "You are provided the following series of three frames from a 0:01:01 [H:MM:SS] video.\n"
        "\nFrame from 00:00:F\nFrame from 00:01:F\nFrame from 01:01:F\n\n"
    )
    assert [spelled(number) for number in (0, 19, 20, 64, 100, 121, 999)] == [
        *("zero", "nineteen", "twenty", "sixty-four", "one hundred", "one hundred and twenty-one"),
        "nine hundred and ninety-nine",
    ]
