"""/v1/videos on a fake pipeline: the life of a job, across restarts, and its visibility."""

import asyncio
import io
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from engine.errors import EngineDied, QueueFull
from engine.visual.base import VisualStream
from engine.visual.engine import QueuedVisualEngine
from engine.visual.types import VisualDelta, VisualInfo, VisualRequest
from multimodal.errors import RequestError
from protocol.visual import VideoJob, VideoRequest
from routers.database import StoreUnavailable
from routers.visual.drawing import VisualLimits, video_request
from routers.visual.jobs import VideoJobs, VideoRecord
from routers.visual.media import MediaStore
from routers.visual.worker import VideoWorker
from server.http.errors import render_event
from tests.routers.visual.test_images import KEYS, key, picture, refusal
from tests.support.servers import application
from tests.support.waiting import slowness

pytest.importorskip("av")
PATH = "/v1/videos"
BODY: dict[str, Any] = {"model": "fake", "prompt": "a red circle"}
LONG = BODY | {"num_inference_steps": 200}
SLOW: dict[str, Any] = {"modality": "visual", "fake_token_delay_ms": 5}
REQUEST = VisualRequest(
    request_id="r", prompt="a", seeds=(1,), width=8, height=8, steps=1, frames=1, fps=1, format="webm"
)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(modality="visual", cache_dir=tmp_path) as (client, _):
        yield client


async def create(client: httpx.AsyncClient, body: dict[str, Any] = BODY, **options: Any) -> VideoJob:
    answer = await client.post(PATH, json=body, **options)
    assert answer.status_code == 202, answer.text
    return VideoJob.model_validate(answer.json())


async def reached(client: httpx.AsyncClient, job: VideoJob, *states: str, **options: Any) -> VideoJob:
    """The job in one of these states."""
    async with asyncio.timeout(20 * slowness()):
        while True:
            found = VideoJob.model_validate((await client.get(f"{PATH}/{job.id}", **options)).json())
            if found.status in states:
                return found
            await asyncio.sleep(0.01)


def frames_of(answer: httpx.Response) -> list[Any]:
    import av  # noqa: PLC0415

    with av.open(io.BytesIO(answer.content)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


async def test_a_job_from_the_request_to_the_file(client: httpx.AsyncClient) -> None:
    body = BODY | {"seconds": "1.5", "fps": 4, "size": "32x16", "seed": 3, "output_compression": 50}
    job = await create(client, body)
    assert (job.status, job.progress, job.seconds, job.num_frames) == ("queued", 0, "1.5", 6)
    done = await reached(client, job, "completed")
    assert (done.progress, done.size, done.seed, done.stage) == (100, "32x16", 3, None)
    assert done.completed_at is not None
    assert done.expires_at is not None
    file = await client.get(f"{PATH}/{job.id}/content")
    assert file.headers["content-type"] == "video/webm"
    assert [frame.shape for frame in frames_of(file)] == [(16, 32, 3)] * 6
    part = await client.get(f"{PATH}/{job.id}/content", headers={"Range": "bytes=0-3"})
    assert (part.status_code, part.content) == (206, b"\x1aE\xdf\xa3")
    deleted = await client.delete(f"{PATH}/{job.id}")
    assert deleted.json() == {"id": job.id, "object": "video.deleted", "deleted": True}
    assert refusal(await client.get(f"{PATH}/{job.id}"), 404) == ("video_id", "video_not_found")


async def test_jobs_are_listed_in_pages(client: httpx.AsyncClient) -> None:
    jobs = [await create(client) for _ in range(3)]
    ids = [job.id for job in jobs]
    first = (await client.get(PATH, params={"limit": 2})).json()
    assert ([job["id"] for job in first["data"]], first["has_more"]) == (ids[:0:-1], True)
    rest = (await client.get(PATH, params={"after": first["last_id"]})).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (ids[:1], False)
    assert [job["id"] for job in (await client.get(PATH, params={"order": "asc"})).json()["data"]] == ids
    refusal(await client.get(PATH, params={"after": "video_none"}), 404)


async def test_cancelling_ends_a_job_before_its_next_step(tmp_path: Path) -> None:
    async with application(**SLOW, cache_dir=tmp_path) as (client, state):
        running, waiting, last = [await create(client, LONG) for _ in range(3)]
        begun = await reached(client, running, "in_progress")
        assert begun.stage == "generating"
        refusal(await client.get(f"{PATH}/{running.id}/content"))
        for job in (waiting, running):
            cancelled = VideoJob.model_validate((await client.post(f"{PATH}/{job.id}/cancel")).json())
            assert cancelled.status == "cancelled"
        assert (await client.delete(f"{PATH}/{last.id}")).status_code == 200
        news = aiter(state["replica"].service.engine.stats())
        async with asyncio.timeout(20 * slowness()):
            while (now := await anext(news)).running:
                pass
        assert now.steps < 200
        assert (await client.post(f"{PATH}/{running.id}/cancel")).json()["status"] == "cancelled"


async def test_a_failure_says_why(client: httpx.AsyncClient) -> None:
    for prompt, code in (("fail", "engine_failure"), ("refuse", "invalid_request_error")):
        failed = await reached(client, await create(client, BODY | {"prompt": prompt}), "failed")
        assert failed.error is not None
        assert failed.error.code == code
        assert failed.error.message
        refusal(await client.get(f"{PATH}/{failed.id}/content"))


async def test_jobs_go_on_after_a_restart(tmp_path: Path) -> None:
    async with application(**SLOW, cache_dir=tmp_path) as (client, _):
        job = await create(client, LONG)
        await reached(client, job, "in_progress")
    async with application(modality="visual", cache_dir=tmp_path) as (client, _):
        await reached(client, job, "completed")
        assert (await client.get(f"{PATH}/{job.id}/content")).status_code == 200


async def test_jobs_belong_to_a_key(tmp_path: Path) -> None:
    async with application(modality="visual", cache_dir=tmp_path, **KEYS) as (client, _):
        job = await create(client, headers=key("one"))
        await reached(client, job, "completed", headers=key("one"))
        other = {"headers": key("two")}
        for path in (f"{PATH}/{job.id}", f"{PATH}/{job.id}/content"):
            refusal(await client.get(path, **other), 404)
        refusal(await client.delete(f"{PATH}/{job.id}", **other), 404)
        refusal(await client.post(f"{PATH}/{job.id}/cancel", **other), 404)
        assert (await client.get(PATH, **other)).json()["data"] == []


async def test_only_so_many_jobs_may_wait(tmp_path: Path) -> None:
    async with application(**SLOW, cache_dir=tmp_path, video_max_jobs=1) as (client, _):
        job = await create(client, LONG)
        assert refusal(await client.post(PATH, json=BODY), 429)[1] == "queue_full"
        await client.delete(f"{PATH}/{job.id}")
        await create(client)


async def test_a_key_cannot_fill_the_queue(tmp_path: Path) -> None:
    async with application(**SLOW, cache_dir=tmp_path, video_max_jobs=8, api_keys="one,two") as (client, _):
        for key in ("one", "two"):
            client.headers["authorization"] = f"Bearer {key}"
            for _ in range(2):
                await create(client, LONG)
            answer = await client.post(PATH, json=LONG)
            assert refusal(answer, 429)[1] == "queue_full" and "a key may have 2 of the 8" in answer.text


async def test_a_server_with_one_key_gives_it_the_whole_queue(tmp_path: Path) -> None:
    async with application(**SLOW, cache_dir=tmp_path, video_max_jobs=4, api_keys="one") as (client, _):
        client.headers["authorization"] = "Bearer one"
        for _ in range(4):
            await create(client, LONG)
        answer = await client.post(PATH, json=LONG)
        assert refusal(answer, 429)[1] == "queue_full" and "oo many videos wait already" in answer.text


async def test_keys_take_turns_and_each_may_have_a_job(tmp_path: Path) -> None:
    jobs = VideoJobs(MediaStore(tmp_path, 1000, 60), 3)
    for owner in "aaabc":
        await jobs.create(owner, REQUEST)
    for owner in "ab":
        with pytest.raises(QueueFull):
            await jobs.create(owner, REQUEST)
    begun = [await jobs.take() for _ in range(2)]
    order = ""
    while begun:
        job = begun.pop(0)
        assert job is not None
        order += job.owner
        await jobs.end(job.number, "completed")
        if (following := await jobs.take()) is not None:
            begun.append(following)
    assert order == "abcaa"
    await jobs.media.close()


async def test_a_video_that_takes_too_long_fails(tmp_path: Path) -> None:
    async with application(**SLOW, cache_dir=tmp_path, video_timeout_seconds=0.05) as (client, _):
        failed = await reached(client, await create(client, LONG), "failed")
        assert failed.error is not None
        assert failed.error.code == "deadline_exceeded"


async def test_a_video_is_answered_at_once(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{PATH}/generations", json=BODY | {"seed": 4})
    assert answer.status_code == 200
    assert answer.content.startswith(b"\x1aE\xdf\xa3")
    assert answer.headers["x-trellis-seed"] == "4"


async def test_a_form_is_taken_as_json_is(client: httpx.AsyncClient) -> None:
    files = {"seconds": (None, "2"), "prompt": (None, "a red circle"), "model": (None, "fake")}
    answer = await client.post(PATH, files=files)
    assert answer.status_code == 202, answer.text
    assert answer.json()["seconds"] == "2"
    reference = files | {"input_reference": ("a.png", b"x", "image/png")}
    assert refusal(await client.post(PATH, files=reference), 415)[0] == "input_reference"


async def test_a_video_begins_with_a_picture(tmp_path: Path) -> None:
    """As a file of a form, or by a URL; the job has it over a restart, and the store no longer than that."""
    url = f"data:image/png;base64,{b64encode(picture()).decode()}"
    asked = BODY | {"seed": 1, "num_inference_steps": 200}
    by_url = asked | {"input_reference": {"image_url": url}}
    form = {name: (None, str(value)) for name, value in asked.items()} | {"input_reference": ("a.png", picture())}
    async with application(**SLOW, cache_dir=tmp_path) as (client, _):
        job = await create(client, by_url)
        await reached(client, job, "in_progress")
        cancelled = await create(client, by_url)
        await client.post(f"{PATH}/{cancelled.id}/cancel")
    async with application(modality="visual", cache_dir=tmp_path) as (client, state):
        await reached(client, job, "completed")
        found = frames_of(await client.get(f"{PATH}/{job.id}/content"))
        assert (found[0] == frames_of(await client.post(f"{PATH}/generations", files=form))[0]).all()
        assert (found[0] != frames_of(await client.post(f"{PATH}/generations", json=asked))[0]).any()
        left = "SELECT count(*) FROM video_images"
        database = state["replica"].service.media.database
        assert await database.run(lambda db: db.execute(left).fetchone()) == (0,)


async def test_reference_pictures_must_fit_the_model(client: httpx.AsyncClient) -> None:
    given = BODY | {"input_reference": {"image_url": "data:image/png;base64,iVBORw0KGgo="}}
    answers = []
    for info, body in ((FREE, given), (replace(FREE, animates=True, needs_image=True), BODY)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QueuedVisualEngine, "info", info)
            answers.append(refusal(await client.post(PATH, json=body)))
    assert answers == [("input_reference", "unsupported_parameter"), ("input_reference", None)]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seconds": "long"}, "seconds"),
    ({"seconds": 0}, "seconds"),
    ({"seconds": "1e9"}, "seconds"),
    ({"seconds": 60}, "seconds"),
    ({"num_frames": 1000}, "num_frames"),
    ({"num_frames": 8, "seconds": 1, "fps": 8}, "num_frames"),
    ({"fps": 0.5}, "fps"),
    ({"size": "8192x8192"}, "size"),
    ({"num_frames": 250, "size": "2048x2048"}, "num_frames"),
    ({"input_reference": {"image_url": "http://127.0.0.1/a.png"}}, "input_reference"),
    ({"input_reference": {"file_id": "file-1"}}, "input_reference"),
    ({"input_reference": {}}, "input_reference"),
]


async def test_a_refusal_names_the_field(client: httpx.AsyncClient) -> None:
    for fields, param in WRONG:
        assert refusal(await client.post(PATH, json=BODY | fields))[0] == param, fields


LIMITS = VisualLimits(
    visual_max_images=1,
    visual_max_pixels=1 << 20,
    visual_max_steps=100,
    visual_max_frames=256,
    visual_max_video_pixels=1 << 28,
    max_image_bytes=1,
    max_image_pixels=1,
)
FIXED = VisualInfo(
    pipeline="P", backend="fake", device="cpu", dtype="float32", makes=("video",), frames=16, frames_fixed=True
)
FREE = VisualInfo(
    pipeline="P", backend="fake", device="cpu", dtype="float32", makes=("video",), frames=81, frames_step=4, fps=16
)


def test_numbers_of_frames_that_the_model_does_not_make_are_refused() -> None:
    for info in (FIXED, FREE):
        with pytest.raises(RequestError) as refused:
            video_request(VideoRequest(prompt="a", num_frames=18), info, LIMITS, "r")
        assert refused.value.param == "num_frames"


@pytest.mark.parametrize(
    ("info", "fields", "frames", "fps"),
    [
        (FIXED, {}, 16, 8.0),
        (FIXED, {"seconds": 4.0}, 16, 4.0),
        (FIXED, {"fps": 16.0}, 16, 16.0),
        (FIXED, {"num_frames": 16, "seconds": 1.0}, 16, 16.0),
        (FREE, {}, 81, 16.0),
        (FREE, {"seconds": 2.0}, 33, 16.0),
        (FREE, {"seconds": 1.0, "fps": 8.0}, 9, 8.0),
        (FREE, {"num_frames": 17}, 17, 16.0),
        (FREE, {"num_frames": 17, "seconds": 2.0}, 17, 8.5),
    ],
    ids=str,
)
def test_frames_and_their_rate(info: VisualInfo, fields: dict[str, Any], frames: int, fps: float) -> None:
    asked = video_request(VideoRequest(prompt="a", **fields), info, LIMITS, "r")
    assert (asked.frames, asked.fps) == (frames, fps)


class Engine:
    """Answers each request with what `answers` returns for its prompt, and counts them."""

    def __init__(self, answers: Callable[[str], VisualStream]) -> None:
        self.asked = 0
        self._answers = answers

    def generate(self, request: VisualRequest) -> VisualStream:
        self.asked += 1
        return self._answers(request.prompt)


MADE = VisualDelta("file", 100, 0, b"video", True)


def made(_: str) -> VisualStream:
    stream = VisualStream(lambda: None)
    stream.put(MADE)
    return stream


async def ended(jobs: VideoJobs, engine: Any, *prompts: str) -> list[VideoRecord]:
    """What becomes of jobs with these prompts."""
    ids = [(await jobs.create("me", replace(REQUEST, prompt=prompt))).id for prompt in prompts]
    worker = VideoWorker(jobs, engine, 60, render_event, lambda: True, pause=0.01)
    working = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(20 * slowness()):
            while True:
                found = [await jobs.get("me", job) for job in ids]
                if not {job.state for job in found} & {"queued", "in_progress"}:
                    return found
                await asyncio.sleep(0.01)
    finally:
        working.cancel()
        await asyncio.wait([working])
        await jobs.media.close()


async def test_a_job_that_kills_the_engine_is_given_up(tmp_path: Path) -> None:
    engine = Engine(lambda _: VisualStream.failed(EngineDied("killed")))
    (found,) = await ended(VideoJobs(MediaStore(tmp_path, 1000, 60), 5), engine, "a")
    assert engine.asked == 3
    assert b"engine_died" in (found.error or b"")


async def test_a_job_that_kills_the_engine_does_not_fail_others(tmp_path: Path) -> None:
    running: list[VisualStream] = []

    def answer(prompt: str) -> VisualStream:
        running.append(stream := VisualStream(lambda: None))
        if prompt == "deadly":
            for each in running:
                each.fail(EngineDied("killed"))
            running.clear()
        else:
            asyncio.get_running_loop().call_later(0.3, stream.put, MADE)
        return stream

    jobs = VideoJobs(MediaStore(tmp_path, 1000, 60), 5)
    found = await ended(jobs, Engine(answer), "harmless", "deadly")
    assert [job.state for job in found] == ["completed", "failed"]


async def test_a_video_that_cannot_be_kept_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(made)
    (found,) = await ended(VideoJobs(MediaStore(tmp_path, 1, 60), 5), engine, "a")
    assert (found.state, engine.asked) == ("failed", 1)
    assert b"MEDIA_STORE_MB" in (found.error or b"")
    monkeypatch.setattr("routers.visual.media.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
    (found,) = await ended(VideoJobs(MediaStore(tmp_path, 1000, 60), 5), engine, "a")
    assert (found.state, engine.asked) == ("failed", 2)
    assert b"cannot be stored" in (found.error or b"")


async def test_a_job_goes_on_after_the_store_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = VideoJobs(MediaStore(tmp_path, 1000, 60), 5)
    engine: Engine = Engine(lambda prompt: VisualStream(lambda: None) if engine.asked == 1 else made(prompt))
    wanted = jobs.wanted

    async def fails_once(number: int) -> bool:
        monkeypatch.setattr(jobs, "wanted", wanted)
        raise StoreUnavailable("locked")

    monkeypatch.setattr(jobs, "wanted", fails_once)
    (found,) = await ended(jobs, engine, "a")
    assert found.state == "completed"
    assert engine.asked == 2
