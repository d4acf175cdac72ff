"""Compose an engine, and the parts that turn requests into its prompts."""

import asyncio
import dataclasses
import hashlib
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.admission import MOST_WAITING_BYTES, AdmissionEngine
from engine.base import Engine
from engine.checkpoints.facts import transcribes
from engine.checkpoints.whisper import WhisperSizes, WhisperTokens, read_sizes, read_tokens
from engine.create import create_engine
from engine.errors import EngineFailure
from engine.kit.tasks import all_of, background, in_thread
from engine.media import Speech
from engine.process.child import EngineProcess
from engine.process.client import EngineClient
from engine.sleep import SleepingEngine
from engine.types import EngineInfo
from multimodal.metrics import GenerationMetrics
from multimodal.processor import Processor
from multimodal.request import Limits
from multimodal.speech.transcriber import Transcriber
from multimodal.text.prompts import Prompts
from multimodal.text.templates import ChatTemplate
from multimodal.text.tokenizer import Tokenizer
from routers.batches.store import BatchStore
from routers.batches.worker import BatchWorker
from routers.fields import FieldCheck
from routers.responses.service import Responses
from routers.responses.store import SqliteStore
from routers.state import ChatService, PrefillService
from server import __version__
from server.compose.composition import Composition, Failed, follow_sleep, never
from server.compose.config import default_processors, engine_config, sleep_config
from server.compose.encoders import Encoders, image_prompts, start_encoders
from server.compose.model import answer_format, load_text, model_folder, sampling_defaults
from server.compose.publishing import publish_events
from server.compose.sizing import standby, this_machine
from server.health.canary import engine_probe
from server.http.errors import render_event
from server.metrics.peers import PeerMetrics
from server.metrics.replica import watch_engine_process

if TYPE_CHECKING:
    from engine.embedded.whisper.reader import HostedReader

_HEALTH_PAUSE = 1.0
_READ_SECONDS, _READ_SPEED = 60.0, 60.0
"""Seconds that decoding any audio file may take, and seconds of audio that add one more second to that."""


async def add_engine(to: Composition, folder: Path | None) -> Failed:
    """Start the engine and set the replica's service. `folder` is None if the engine already runs at an address."""
    settings = to.settings
    local, failed = await _open_engine(to, folder)
    to.health.check("engine", lambda: "" if local.healthy else "The engine is restarting, or does not answer.")
    processes = settings.api_processes or 1
    engine = AdmissionEngine(
        _with_remote_prefill(to, local),
        -(-settings.max_queue_size // processes),
        settings.queue_timeout_seconds,
        MOST_WAITING_BYTES // processes,
    )
    to.stack.push_async_callback(engine.close)
    starting: list[Coroutine[Any, Any, Any]] = [engine.start()]
    if settings.engine_address:  # once the engine there answers, whoever started it has the model ready
        await all_of(starting)
        folder, starting = await in_thread(partial(model_folder, settings)), []
    found = await all_of([_load_text(to, folder), start_encoders(to, folder), *starting])
    text: tuple[Tokenizer, ChatTemplate | None] | None = found[0]
    encoders: Encoders = found[1]
    if text is not None and engine.info.backend != "fake":
        check_vocabulary(text[0], engine.info)
    await to.stack.enter_async_context(background(to.metrics.watch_engine(engine), "engine-statistics"))
    if sleep_config(settings) is not None:
        assert isinstance(local, EngineClient | SleepingEngine)
        await follow_sleep(to, local)
    speech = await _start_speech(to, folder)
    probe = engine_probe(local, prefill_only=to.role.prefill_only, **(speech.probe if speech is not None else {}))
    awake = lambda: local.healthy and to.replica.sleep.phase == "awake"  # noqa: E731
    await to.health.add_canary(probe, lambda: to.metrics.iteration, awake, to.stack)
    publish_events(to, engine)
    if text is None:
        prefill = PrefillService(engine=engine, encoding=encoders.service)
        to.metrics.polled.gauge(
            "trtllm_prefill_tokens_waiting",
            "Tokens of other replicas' prompts that have no first token yet",
            lambda: prefill.waiting_tokens,
            "livesum",
        )
        to.replica.service = prefill
    else:
        service = _chat_service(to, engine, folder, encoders, speech, *text)
        if service.batches is not None:
            await to.stack.enter_async_context(background(_batch_worker(to, service).run(), "batches"))
        to.replica.service = service
    return failed


def check_vocabulary(tokenizer: Tokenizer, info: EngineInfo) -> None:
    """Raise EngineFailure if the tokenizer has more tokens than the model, and so belongs to another one. Added tokens
    do not count: models without images may keep the image token.
    """
    tokens = tokenizer.backend.get_vocab_size(with_added_tokens=False)
    if tokens > info.vocab_size:
        raise EngineFailure(
            f"the tokenizer.json of {info.model} has {tokens} tokens, and vocab_size in the config.json there is "
            f"{info.vocab_size}: the files belong to different models"
        )


async def _open_engine(to: Composition, folder: Path | None) -> tuple[Engine, Failed]:
    """Return the engine, not yet started: at an address, in this process, or in a process that is started."""
    settings = to.settings
    if settings.engine_address:
        return EngineClient(settings.engine_address), never
    config = engine_config(settings, folder)
    if not settings.engine_process:
        engine = create_engine(config)
        return engine, partial(_stopped, engine)
    prepared, room = standby(settings, this_machine())
    process = EngineProcess(
        config, on_death=settings.engine_on_death, standby=prepared, standby_room=room, spare=to.spare
    )
    watch_engine_process(to.metrics.polled, process)
    to.stack.push_async_callback(process.close)
    await process.start()
    return EngineClient(process.address, process.wait_failed), process.wait_failed


async def _stopped(engine: Engine) -> str:
    """Wait until an engine in this process has stopped working."""
    while engine.healthy:  # noqa: ASYNC110 - an engine has no event for it
        await asyncio.sleep(_HEALTH_PAUSE)
    return "the engine has stopped working"


def _with_remote_prefill(to: Composition, local: Engine) -> Engine:
    """Return `local`, or an engine around it that has prompts computed by other replicas before `local` decodes."""
    if not to.role.remote_prefill:
        return local
    from engine.replicas.prefill_engine import DisaggregatedEngine  # noqa: PLC0415 - most replicas do without
    from engine.replicas.prefill_pool import PrefillPool  # noqa: PLC0415

    settings, name = to.settings, to.replica.model_name
    observer = PeerMetrics(to.metrics.registry, name, "prefill")
    if to.graph is not None:
        return DisaggregatedEngine(local, to.graph.prefills(), name, 0, observer)
    pool = PrefillPool(settings.prefill_urls, to.internal_secret, settings.prefill_attempts, observer)
    min_tokens = settings.prefill_min_tokens if settings.prefill_fallback == "local" else None
    engine = DisaggregatedEngine(local, pool, name, min_tokens, observer)
    to.replica.peers["prefill"] = lambda: pool.counts
    if min_tokens is None:
        to.health.check("prefill_peers", lambda: "" if pool.healthy(engine.common) else "No prefill replica answers.")
    return engine


async def _load_text(to: Composition, folder: Path | None) -> tuple[Tokenizer, ChatTemplate | None] | None:
    return await in_thread(partial(load_text, to.settings, folder)) if to.role.has_text else None


def _chat_service(
    to: Composition,
    engine: AdmissionEngine,
    folder: Path | None,
    encoders: Encoders,
    speech: "_Transcribing | None",
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> ChatService:
    settings, name = to.settings, to.replica.model_name
    control = template.control if template is not None else None
    images = None
    if control is not None:
        images = image_prompts(to, folder, encoders, tokenizer, control, engine.info)
    if images is not None:
        to.stack.push_async_callback(images.aclose)
    answers = answer_format(settings, folder, template)
    limits = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Limits)}
    metrics = GenerationMetrics(to.metrics.registry, name, answers.parser_names)
    processor = Processor(
        engine,
        Prompts(tokenizer, template, images, openings=answers.reads_prompts),
        Limits(**limits),
        name,
        metrics,
        default_processors(settings),
        answers,
        sampling_defaults(settings, folder, dict(engine.info.refused_parameters)),
        __version__,
    )
    transcriber = None
    if speech is not None:
        transcriber = Transcriber(
            engine, speech.reader, tokenizer, speech.sizes, speech.tokens, processor.limits, metrics, name
        )
    return ChatService(
        engine=engine,
        processor=processor,
        fields=FieldCheck(
            name,
            strict=settings.strict_fields,
            model_optional=settings.model_optional,
            transcribes=transcriber is not None,
        ),
        transcriber=transcriber,
        images=images,
        encoder=encoders.encoder,
        responses=_responses(to),
        batches=_batch_store(to),
    )


class _Transcribing(NamedTuple):
    """The parts that a transcribing model needs in addition to its engine."""

    reader: "HostedReader"
    sizes: WhisperSizes
    tokens: WhisperTokens

    @property
    def probe(self) -> dict[str, Any]:
        """Arguments of `engine_probe`: silence, and the token that begins a transcript."""
        silence = bytes(4 * self.sizes.bins * self.sizes.frames)
        return {"token": self.tokens.start, "speech": Speech(key="canary", data=silence, frames=0)}


async def _start_speech(to: Composition, folder: Path | None) -> _Transcribing | None:
    """Start the reader of audio files, if the model transcribes."""
    if folder is None or to.settings.engine != "embedded" or not transcribes(folder):
        return None
    try:
        from engine.embedded.whisper.reader import HostedReader, ReaderConfig  # noqa: PLC0415 - most models do without
    except ImportError as error:
        raise EngineFailure(f"audio cannot be decoded ({error}): pip install soundfile soxr") from error
    sizes, tokens = read_sizes(folder), read_tokens(folder)
    longest = to.settings.max_transcription_seconds
    reader = HostedReader(
        ReaderConfig(
            bins=sizes.bins,
            frames=sizes.frames,
            max_seconds=longest,
            timeout_seconds=_READ_SECONDS + longest / _READ_SPEED,
        )
    )
    to.stack.push_async_callback(reader.close)
    await reader.start()
    return _Transcribing(reader, sizes, tokens)


def _batch_store(to: Composition) -> BatchStore | None:
    """Return the store that all replicas of a model on this machine share."""
    settings = to.settings
    if not settings.batches_mb:
        return None
    model = hashlib.sha256(to.replica.model_name.encode()).hexdigest()[:16]
    path = settings.cache_dir / "batches" / f"{model}.sqlite"
    store = BatchStore(path, settings.batches_mb << 20, settings.batch_max_requests)
    to.stack.push_async_callback(store.close)
    return store


def _batch_worker(to: Composition, service: ChatService) -> BatchWorker:
    settings = to.settings
    assert service.batches is not None
    return BatchWorker(
        store=service.batches,
        processor=service.processor,
        fields=service.fields,
        max_text_bytes=int(settings.max_text_mb * (1 << 20)),
        max_values=settings.max_body_values,
        render_error=render_event,
        concurrency=settings.batch_concurrency,
        ready=lambda: not to.replica.draining and service.healthy and not to.replica.sleep.obstacle,
    )


def _responses(to: Composition) -> Responses:
    settings = to.settings
    store = None
    if settings.responses_store_mb:
        path = settings.cache_dir / "responses.sqlite3"
        store = SqliteStore(path, settings.responses_store_mb << 20, settings.responses_store_days * 86400)
    responses = Responses(store, int(settings.max_body_mb * (1 << 20)))
    to.stack.push_async_callback(responses.close)
    return responses
