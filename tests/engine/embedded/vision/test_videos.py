"""Processing of videos gives transformers' results: the same pixels, text and positions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText
from transformers.models.smolvlm import processing_smolvlm
from transformers.video_utils import VideoMetadata

from engine.checkpoints.facts import read_model_facts
from engine.config import EncoderConfig
from engine.embedded.models.embeddings import PromptImages
from engine.embedded.vision import videos
from engine.embedded.vision.batches import BatchEncoder
from engine.kit.video_text import spelled
from engine.media import EncodedMedia, FrameSampling, MediaInput, MediaSpan, MediaSpans
from engine.types import GenerateRequest, SamplingParams
from tests.support.videos import frames_of, video_bytes
from tests.support.vision_models import BUILDERS, TOKENS, image_bytes

VIDEO = video_bytes("avi", count=24, fps=8.0)
COUNT = 5
TAKEN = {
    "llava": [0, 5, 11, 17, 23],
    "smolvlm": [0, 5, 11, 17, 23],
    "qwen2_vl": [0, 6, 12, 18],
    "qwen2_5_vl": [0, 6, 12, 18],
}


@pytest.fixture(scope="module", params=[*TAKEN])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> BatchEncoder:
    return BatchEncoder(EncoderConfig(model=str(folder), dtype="float32"))


@pytest.fixture
def lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the file's frames be exact, as no codec leaves them."""

    def frames(self: Any, wanted: list[int]) -> Any:
        return ((index, frames_of(24)[index]) for index in wanted)

    monkeypatch.setattr("engine.kit.video_file.VideoFile.frames", frames)


def metadata(taken: list[int]) -> VideoMetadata:
    return VideoMetadata(total_num_frames=24, fps=8.0, duration=3.0, frames_indices=taken)


def encode(encoder: BatchEncoder, *files: MediaInput) -> list[EncodedMedia]:
    found = dict(pair for pairs in encoder.encode(files) for pair in pairs)
    for outcome in found.values():
        assert isinstance(outcome, EncodedMedia), outcome
    return [found[index] for index in range(len(files))]  # type: ignore[misc]


def rows_of(encoded: EncodedMedia) -> torch.Tensor:
    return torch.frombuffer(bytearray(encoded.data), dtype=torch.float32).view(encoded.rows, -1)


@pytest.mark.usefixtures("lossless")
def test_pixels_text_and_embeddings(folder: Path, encoder: BatchEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = folder.name.rstrip("0123456789")
    taken = TAKEN[kind]
    (encoded,) = encode(encoder, MediaInput(VIDEO, kind="video", sampling=FrameSampling(num_frames=COUNT)))
    pictures = [frames_of(24)[index] for index in taken]
    ours = encoder.processing.processor
    images = ours.image_processor
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs: dict[str, Any]
    if kind.startswith("qwen"):
        pytest.importorskip("torchvision", reason="transformers' processors of videos need it")
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor  # noqa: PLC0415

        theirs = Qwen2VLVideoProcessor.from_pretrained(folder)
        inputs = theirs([np.stack(pictures)], return_tensors="pt", do_sample_frames=False)
        expected = model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        assert list(encoded.grid) == inputs["video_grid_thw"][0].tolist() == [2, 12, 16]
        assert encoded.text == "<|video_pad|>" * 96
        pixels = encoder.processing.prepare(
            MediaInput(VIDEO, kind="video", sampling=FrameSampling(num_frames=COUNT))
        ).tensors["pixel_values"]
        torch.testing.assert_close(pixels, inputs["pixel_values_videos"], rtol=0, atol=1e-6)
        seconds = 2 / metadata(taken).sampled_fps
        assert encoded.interval == (4 * seconds if kind == "qwen2_5_vl" else 1.0)
    elif kind == "smolvlm":
        inputs = images([pictures], return_tensors="pt", do_image_splitting=False, return_row_col_info=True)
        expected = model.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"])
        monkeypatch.setattr(processing_smolvlm, "num2words", spelled)
        reference: Any = object.__new__(processing_smolvlm.SmolVLMProcessor)
        reference.image_seq_len = ours.image_seq_len
        reference.image_token = "<image>"
        reference.fake_image_token = "<fake_token_around_image>"
        reference.global_image_token = "<global-img>"
        given = {"pixel_values": inputs["pixel_values"], "video_metadata": [metadata(taken)]}
        assert encoded.text == reference.replace_video_token(given, 0)
    else:
        expected = model.get_image_features(images(pictures, return_tensors="pt")["pixel_values"])
        assert encoded.text == "<image>" * 16 * COUNT
    with torch.inference_mode():
        torch.testing.assert_close(rows_of(encoded), torch.cat(tuple(expected.pooler_output)).view(encoded.rows, -1),
                                   rtol=1e-4, atol=1e-4)  # fmt: skip


def test_rates_counts_and_refusals(folder: Path, encoder: BatchEncoder) -> None:
    count: Callable[[EncodedMedia], int] = lambda one: one.rows // encode_one(1).rows  # noqa: E731

    def encode_one(frames: int) -> EncodedMedia:
        return encode(encoder, MediaInput(VIDEO, kind="video", sampling=FrameSampling(num_frames=frames)))[0]

    picture = MediaInput(image_bytes())
    mixed = encode(encoder, picture, MediaInput(VIDEO, kind="video"), picture)
    assert mixed[0] == mixed[2] and count(mixed[1]) == (3 if encoder.info.video_token_id >= 0 else 6)  # two a second
    (refused,) = dict(*encoder.encode([MediaInput(b"RIFF", kind="video")])).values()
    assert "cannot be read" in str(refused)


def test_frames_that_take_too_much_memory_are_refused(encoder: BatchEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of families that scale frames to millions of pixels, if the file has as many."""
    at_once, more = (MediaInput(VIDEO, kind="video", sampling=FrameSampling(num_frames=count)) for count in (4, 6))
    monkeypatch.setattr(videos, "MOST_PIXELS", encoder.processing.prepare(at_once).tensors["pixel_values"].numel() // 3)
    assert isinstance(dict(*encoder.encode([at_once]))[0], EncodedMedia)
    outcome = dict(*encoder.encode([more]))[0]
    assert isinstance(outcome, EncodedMedia) == (encoder.info.video_token_id < 0)
    if not isinstance(outcome, EncodedMedia):
        assert "ask for a lower 'num_frames'" in str(outcome)


def test_positions_are_those_of_transformers(folder: Path, encoder: BatchEncoder) -> None:
    takes = read_model_facts(folder).image_tokens
    assert takes is not None
    if not takes.merge:
        return
    picture, video = encode(
        encoder, MediaInput(image_bytes()), MediaInput(VIDEO, kind="video", sampling=FrameSampling(4.0))
    )
    assert video.grid[0] == 6
    ids = [300, 301, *[TOKENS["<|video_pad|>"]] * video.rows, 302, *[TOKENS["<|image_pad|>"]] * picture.rows, 303]
    spans = [
        MediaSpan(key="0" * 64, start=start, length=one.rows, rows=one.rows, dtype="float32", grid=one.grid,
                  interval=one.interval, kind=kind)
        for one, start, kind in ((video, 2, "video"), (picture, 3 + video.rows, "image"))
    ]  # type: ignore[arg-type]  # fmt: skip
    request = GenerateRequest(
        request_id="a",
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=1),
        media=MediaSpans(tuple(spans)),
    )
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    kinds = [2 if token == takes.video_token_id else int(token == takes.token_id) for token in ids]
    expected, _ = model.model.get_rope_index(
        torch.tensor([ids]),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor([picture.grid]),
        video_grid_thw=torch.tensor([video.grid]),
        **({"second_per_grid_ts": torch.tensor([2 / 4.0])} if "2_5" in folder.name else {}),
    )
    torch.testing.assert_close(PromptImages(request, takes).rope_positions(0, len(ids)), expected[:, 0])
    assert video.interval == (2.0 if "2_5" in folder.name else 1.0)
    still = replace(spans[0], interval=1.0)
    alike = PromptImages(replace(request, media=MediaSpans((still, spans[1]))), takes).rope_positions(0, len(ids))
    assert torch.equal(alike, expected[:, 0]) == ("2_5" not in folder.name)
