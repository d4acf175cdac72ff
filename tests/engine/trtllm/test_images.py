"""Images on TensorRT-LLM's stand-in.

They are raw for an engine that encodes them, or encoded elsewhere; replicas are aggregated or disaggregated.
"""

import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from engine.config import TrtllmConfig, TrtllmEncoderConfig
from engine.errors import EngineFailure, EngineNotReady, EngineUnavailable, InvalidRequest
from engine.kit.handoff import decode_handoff, encode
from engine.kv_events import KvEvent, Stored
from engine.media import Encoding, FrameSampling, MediaFiles, MediaInput, MediaSpan, MediaSpans
from engine.trtllm import media
from engine.trtllm.encoder import TrtllmEncoder
from engine.trtllm.engine import TrtllmEngine
from engine.types import Delta, GenerateRequest
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.sounds import sound_bytes
from tests.support.trtllm import BOTH_VERSIONS, IMAGE, NEWEST, handed_over, model_folder, picture, travelled
from tests.support.trtllm_gotchas import request, running
from tests.support.videos import video_bytes
from tests.support.waiting import until

trt, folder, calls = trtllm_gotchas_support.trt, trtllm_gotchas_support.folder, trtllm_gotchas_support.calls  # fixtures
pytestmark = BOTH_VERSIONS
TEXT = "w5 <image> w6 <image> w7"
IDS = (5, IMAGE, 6, IMAGE, 7)
EXPANDED = (5, *[IMAGE] * 16, 6, *[IMAGE] * 16, 7)
ONE = "w5 <image> w6"
ONE_EXPANDED = (5, *[IMAGE] * 16, 6)


RED, BLUE = picture("red").data, picture("blue").data


def bomb() -> bytes:
    """A small file that says of itself to be large."""
    header = b"IHDR" + (9000).to_bytes(4) + (9000).to_bytes(4) + RED[24:29]
    return RED[:12] + header + zlib.crc32(header).to_bytes(4) + RED[33:]


def showing(*files: bytes, **fields: Any) -> GenerateRequest:
    """A request with raw images."""
    return request(
        prompt_token_ids=IDS if len(files) == 2 else IDS[:3],
        media=MediaFiles(TEXT if len(files) == 2 else ONE, tuple(map(MediaInput, files))),
        **{"max_tokens": 20, "ignore_eos": True, **fields},
    )


async def encoded(folder: Path, *files: bytes) -> Encoding:
    """What an encode replica makes of images, as it travels."""
    encoder = TrtllmEncoder(TrtllmEncoderConfig(model=str(folder)))
    await encoder.start()
    try:
        return travelled(await encoder.encode([MediaInput(data) for data in files], TEXT if len(files) == 2 else ONE))
    finally:
        await encoder.close()


async def all_of(engine: TrtllmEngine, wanted: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(wanted)]


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def disaggregated(prefill: TrtllmEngine, decode: TrtllmEngine, wanted: GenerateRequest) -> list[Delta]:
    """By way of prefill; decode sees no image."""
    handed = decode_handoff(encode(await handed_over(prefill, wanted)))
    assert handed.prompt_token_ids in (EXPANDED, ONE_EXPANDED)
    rest = await all_of(decode, replace(wanted, media=None, handoff=handed))
    return [handed.first, *rest]


async def test_handles_of_another_host_are_named_and_never_opened(tmp_path: Path, calls: list[Any]) -> None:
    """Of embeddings for prefill, and of positions for decode."""
    folder = model_folder(tmp_path, rope_scaling={"mrope_section": [2, 3, 3]})

    def elsewhere(state: bytes) -> bytes:
        return msgspec.msgpack.encode({**msgspec.msgpack.decode(state), "memory": "another boot/ipc:[1]"})

    async with running(folder, "prefill") as prefill, running(folder, "decode") as decode:
        encoding = await encoded(folder, RED)
        foreign = replace(encoding, state=elsewhere(encoding.state))
        with pytest.raises(EngineUnavailable, match="encode replica's host") as unavailable:
            await handed_over(prefill, replace(showing(RED), media=foreign))
        assert type(unavailable.value) is EngineUnavailable, "so that another prefill replica is asked"
        handed = await handed_over(prefill, replace(showing(RED), media=encoding))
        submitted = len(calls)
        with pytest.raises(InvalidRequest, match="prefill and decode on one host") as caught:
            await all_of(
                decode, replace(showing(RED), media=None, handoff=replace(handed, state=elsewhere(handed.state)))
            )
        assert caught.value.param == "handoff" and len(calls) == submitted
        assert prefill.healthy and decode.healthy


async def test_raw_images_go_to_the_engine_with_their_text(folder: Path, calls: list[Any]) -> None:
    async with running(folder) as engine:
        said = [await all_of(engine, showing(*files)) for files in ((RED, BLUE), (BLUE, RED), (RED, BLUE))]
        assert tokens_of(said[0]) == tokens_of(said[2]) != tokens_of(said[1])
        for deltas in said:
            assert [delta.prompt is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
            assert deltas[0].prompt is not None and deltas[0].prompt.prompt_tokens == len(EXPANDED)
        inputs = calls[-1][1]["inputs"]
        assert inputs.keys() == {"prompt", "multi_modal_data"} and inputs["prompt"] == TEXT
        assert [(image.mode, image.size) for image in inputs["multi_modal_data"]["image"]] == [("RGB", (8, 6))] * 2
        assert not calls[-1][1]["sampling_params"].add_special_tokens and calls[-1][1]["disaggregated_params"] is None
        assert (await all_of(engine, request()))[0].prompt.prompt_tokens == 0, "the request's own"  # type: ignore[union-attr]


async def test_every_way_of_an_image_gives_the_same_answer(trt: Any, folder: Path, calls: list[Any]) -> None:
    """Aggregated, with embeddings of an encode replica, and both by way of prefill.

    1.2.1 takes those of an encode replica for a single image.
    """
    answers = []
    text, expanded = (TEXT, EXPANDED) if trt.__version__ == NEWEST else (ONE, ONE_EXPANDED)
    async with running(folder) as alone, running(folder, "prefill") as prefill, running(folder, "decode") as decode:
        assert alone.info.max_encoded_images == (0 if trt.__version__ == NEWEST else 1)
        for files in ((RED, BLUE), (BLUE, RED)) if text == TEXT else ((RED,), (BLUE,)):
            raw = showing(*files)
            ready = [replace(raw, media=await encoded(folder, *files)) for _ in range(2)]
            whole = tokens_of(await all_of(alone, raw))
            assert tokens_of(await all_of(alone, ready[0])) == whole
            assert tokens_of(await disaggregated(prefill, decode, raw)) == whole
            assert tokens_of(await disaggregated(prefill, decode, ready[1])) == whole
            answers.append(whole)
            context, generation = calls[-2][1], calls[-1][1]
            assert context["inputs"] == {"prompt": text}
            assert len(context["disaggregated_params"].multimodal_hashes) == len(files)
            assert (
                generation["inputs"] == list(expanded)
                and generation["disaggregated_params"].multimodal_embedding_handles is None
            )
    assert answers[0] != answers[1]


async def test_an_encoder_of_1_2_1_refuses_what_the_engine_could_not_use(trt: Any, folder: Path) -> None:
    """It has one handle for all images, of which `get_prompt_token_ids` expects one for each."""
    if trt.__version__ == NEWEST:
        assert (await encoded(folder, RED, BLUE)).prompt == TEXT
        return
    with pytest.raises(InvalidRequest, match="takes 1 image of a prompt"):
        await encoded(folder, RED, BLUE)


@pytest.mark.parametrize("ready", [False, True])
async def test_a_prompt_begins_once(folder: Path, calls: list[Any], ready: bool) -> None:
    """The template's text has the beginning of sequence that the model's processor adds, whatever it is asked."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    backend.save(str(folder / "tokenizer.json"))
    media = MediaFiles(f"<s> {ONE}", (MediaInput(RED),))
    wanted = replace(showing(RED), prompt_token_ids=(1, *IDS[:3]), media=media)
    if ready:
        async with TrtllmEncoder(TrtllmEncoderConfig(model=str(folder))) as encoder:
            wanted = replace(wanted, media=await encoder.encode(media.files, media.text))
    async with running(folder, "prefill") as engine:
        handed = await handed_over(engine, wanted)
    assert handed.prompt_token_ids == (1, *ONE_EXPANDED)
    assert calls[-1][1]["sampling_params"].add_special_tokens, "if a processor minds, it adds one too"


@pytest.mark.parametrize("ready", [False, True])
async def test_positions_of_mrope_reach_decode_both_or_none(tmp_path: Path, calls: list[Any], ready: bool) -> None:
    for mrope in (False, True):
        folder = tmp_path / str(mrope)
        folder.mkdir()
        model_folder(folder, **({"rope_scaling": {"mrope_section": [2, 3, 3]}} if mrope else {}))
        async with running(folder, "prefill") as prefill, running(folder, "decode") as decode:
            wanted = showing(RED)
            if ready:
                wanted = replace(wanted, media=await encoded(folder, RED))
            await disaggregated(prefill, decode, wanted)
        params = calls[-1][1]["disaggregated_params"]
        assert params.request_type == "generation_only"
        assert (
            (params.mrope_position_ids_handle is not None) == (params.mrope_position_deltas_handle is not None) == mrope
        )


async def test_prompt_logprobs_of_images_are_refused(folder: Path) -> None:
    """Their tokens are not in the vocabulary."""
    async with running(folder) as engine:
        with pytest.raises(InvalidRequest, match="log-probabilities of prompts") as caught:
            await all_of(engine, showing(RED, BLUE, prompt_logprobs=1))
        assert caught.value.param == "prompt_logprobs" and await all_of(engine, showing(RED, BLUE))


async def test_blocks_of_prompts_with_images_are_not_shared(folder: Path, calls: list[Any]) -> None:
    """Blocks with images are not reused; those of text are.

    1.2.1's documentation says that images and the reuse of blocks do not go together.
    """
    long = replace(showing(RED, BLUE), media=MediaFiles(TEXT + " w8" * 100, (MediaInput(RED), MediaInput(BLUE))))
    async with running(folder, "prefill") as prefill, running(folder, "decode") as decode, running(folder) as alone:
        for _ in range(2):
            report = (await all_of(alone, replace(long, cache_salt="tenant")))[0].prompt
            assert report is not None and (report.prompt_tokens, report.cached_tokens) == (len(EXPANDED) + 100, 0)
        for expected in (0, 64):
            report = (await all_of(alone, request(prompt_token_ids=tuple(range(4, 60)) * 2)))[0].prompt
            assert report is not None and (report.cached_tokens > 0) == (expected > 0)
        salts = [call[1]["cache_salt"] for call in calls[-4:]]
        assert (
            salts[0].startswith("tenant/")
            and salts[1].startswith("tenant/")
            and salts[0] != salts[1]
            and salts[2:] == [None, None]
        )
        await disaggregated(prefill, decode, showing(RED, BLUE))
        assert len({call[1]["cache_salt"] for call in calls[-2:]} - {None}) == 2, (
            "nor at decode, where the tokens of all images are alike"
        )


@pytest.mark.parametrize("manager", [1, 2])
async def test_events_name_the_images_of_blocks(trt: Any, folder: Path, manager: int) -> None:
    events: list[KvEvent] = []
    cache: dict[str, Any] = {"event_buffer_max_size": 1000}
    if manager == 2:
        if trt.__version__ != NEWEST:
            pytest.skip("1.2.1 has none")
        cache["use_kv_cache_manager_v2"] = True
    arguments = {"kv_cache_config": cache, "enable_iter_perf_stats": True}
    async with TrtllmEngine(TrtllmConfig(model=str(folder), arguments=arguments)) as engine:

        async def collect() -> None:
            async for batch in engine.kv_events():
                events.extend(batch)

        collecting = asyncio.create_task(collect())
        await all_of(engine, showing(RED, BLUE))
        await until(lambda: any(isinstance(event.data, Stored) and event.data.blocks[0].mm_keys for event in events))
    await collecting
    block = next(
        event.data.blocks[0] for event in events if isinstance(event.data, Stored) and event.data.blocks[0].mm_keys
    )
    assert [key["start_offset"] for key in block.mm_keys] == [0, 0]
    assert len({key["hash"] for key in block.mm_keys}) == 2 and all(key["type"] == "mm_key" for key in block.mm_keys)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no image", "cannot be read|can be read"),
        (RED[:50], "damaged"),
        (picture(form="BMP").data, "cannot be read|can be read"),
        (bomb(), "more than 64000000 pixels"),
    ],
    ids=["bytes", "truncated", "another format", "a bomb"],
)
async def test_images_that_cannot_be_decoded_are_refused_before_submission(
    folder: Path, calls: list[Any], data: bytes, message: str
) -> None:
    async with running(folder) as engine:
        submitted = len(calls)
        with pytest.raises(InvalidRequest, match=message) as caught:
            await all_of(engine, showing(RED, data))
        assert caught.value.param == "image" and len(calls) == submitted
        assert engine.healthy and await all_of(engine, showing(RED, BLUE))


async def test_the_limit_of_pixels_is_the_configurations(folder: Path) -> None:
    async with TrtllmEngine(TrtllmConfig(model=str(folder), max_image_pixels=47)) as engine:
        with pytest.raises(InvalidRequest, match="more than 47 pixels"):
            await all_of(engine, showing(RED, BLUE))


async def test_a_request_without_memory_for_its_images_fails_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_large(images: Sequence[MediaInput], max_pixels: int) -> list[Any]:
        raise MemoryError

    async with running(folder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(media, "decoded", too_large)
            with pytest.raises(EngineFailure, match="no memory"):
                await all_of(engine, showing(RED, BLUE))
        assert engine.healthy and await all_of(engine, showing(RED, BLUE))


async def test_a_request_closed_during_decoding_is_never_submitted(folder: Path, calls: list[Any]) -> None:
    async with running(folder) as engine:
        submitted = len(calls)
        stream = engine.generate(showing(RED, BLUE))
        await asyncio.sleep(0)
        await stream.aclose()
        await until(lambda: not engine.streams)
        await asyncio.sleep(0.1)
        assert len(calls) == submitted and [delta async for delta in stream] == []


async def test_a_request_closed_after_submission_is_aborted(folder: Path) -> None:
    async with running(folder) as engine:
        stream = engine.generate(showing(RED, BLUE, max_tokens=3000))
        await anext(stream)
        await stream.aclose()
        await until(lambda: not engine.running)
        assert engine.aborted == 1 and not engine.streams


async def test_an_engine_that_closes_meanwhile_fails_the_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(folder) as engine:
        begun = asyncio.Event()

        async def never(images: Sequence[MediaInput], max_pixels: int) -> list[Any]:
            begun.set()
            await asyncio.Event().wait()
            return []

        monkeypatch.setattr(media, "decoded", never)
        stream = engine.generate(showing(RED, BLUE))
        await begun.wait()
        await engine.close()
        with pytest.raises(EngineNotReady):
            await anext(stream)


async def test_a_prefill_with_images_is_held_until_its_stream_is_closed(folder: Path) -> None:
    async with running(folder, "prefill") as engine:
        stream = engine.generate(replace(showing(RED, BLUE), prefill_only=True))
        delta = await anext(stream)
        assert delta.held is not None and delta.prompt is not None and delta.prompt.prompt_tokens == len(EXPANDED)
        waiting = asyncio.ensure_future(anext(stream))
        assert not (await asyncio.wait([waiting], timeout=0.1))[0]
        await stream.aclose()
        await asyncio.wait([waiting])
        await until(lambda: not engine.running)


async def test_embeddings_of_the_embedded_engine_are_refused(folder: Path) -> None:
    image = MediaSpan(key="0" * 64, start=1, length=1, rows=1, dtype="float32", data=b"data")
    async with running(folder) as engine:
        with pytest.raises(InvalidRequest, match="encodes images itself"):
            await all_of(engine, request(media=MediaSpans((image,))))


async def test_frames_of_a_video_go_to_the_engine_as_its_own_loader_gives_them(folder: Path, calls: list[Any]) -> None:
    video = MediaInput(video_bytes("avi"), kind="video", sampling=FrameSampling(num_frames=3))
    async with running(folder) as engine:
        wanted = replace(showing(RED), media=MediaFiles(ONE, (video,)))
        assert (await all_of(engine, wanted))[-1].finish_reason is not None
        (data,) = calls[-1][1]["inputs"]["multi_modal_data"]["video"]
        assert [(frame.mode, frame.size) for frame in data.frames] == [("RGB", (64, 48))] * 3
        assert data.metadata == {"total_num_frames": 24, "fps": 8.0, "duration": 3.0, "frames_indices": [0, 11, 23]}
        with pytest.raises(InvalidRequest, match="cannot be read") as caught:
            await all_of(engine, replace(wanted, media=MediaFiles(ONE, (MediaInput(b"RIFF", kind="video"),))))
        assert caught.value.param == "video"


async def test_samples_of_a_recording_go_to_the_engine_as_its_own_loader_gives_them(
    folder: Path, calls: list[Any]
) -> None:
    async with running(folder) as engine:
        wanted = replace(showing(RED), media=MediaFiles(ONE, (MediaInput(sound_bytes(0.5), kind="audio"),)))
        assert (await all_of(engine, wanted))[-1].finish_reason is not None
        ((samples, rate),) = calls[-1][1]["inputs"]["multi_modal_data"]["audio"]
        assert (samples.shape, samples.dtype, rate) == ((8000,), np.float32, 16_000)
        with pytest.raises(InvalidRequest, match="cannot be read") as caught:
            await all_of(engine, replace(wanted, media=MediaFiles(ONE, (MediaInput(b"RIFF", kind="audio"),))))
        assert caught.value.param == "audio"
