"""The canary: an idle replica sends itself a real request, for one token or with a tiny file to encode."""

import asyncio
import io
import logging
import struct
import uuid
import wave
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from engine.base import Engine
from engine.errors import EngineAsleep, EngineError
from engine.media import MediaInput, Speech
from engine.types import CANARY_SALT, GenerateRequest, SamplingParams

OUTCOMES = ("ok", "failed", "timeout")
_SIDE = 32
_LONGEST_LOOK = 1.0

log = logging.getLogger(__name__)

Probe = Callable[[], Awaitable[object]]


class Canary:
    """Runs `probe` once `activity` has not changed for `idle_seconds`; after a failure, every `idle_seconds` until the
    probe succeeds.

    `activity` returns a number that changes with all work, the probe itself included. `up` returns whether a probe
    makes sense. `observe` is called with each outcome, one of `OUTCOMES`.
    """

    def __init__(
        self, probe: Probe, activity: Callable[[], int], up: Callable[[], bool], observe: Callable[[str], None]
    ) -> None:
        self._probe = probe
        self._activity = activity
        self._up = up
        self._observe = observe
        self._reason = ""

    def reason(self) -> str:
        """Return why the last probe failed; empty if it succeeded."""
        return self._reason

    async def run(self, idle_seconds: float, timeout_seconds: float) -> None:
        """Probe until cancelled."""
        while True:
            await self._idle(idle_seconds)
            if self._up():
                with suppress(EngineAsleep):  # which is no failure, even before `up` says so
                    outcome, reason = await self._outcome(timeout_seconds)
                    if self._up():  # else the engine has died, or fallen asleep, meanwhile
                        self._observe(outcome)
                        self._note(reason)

    async def _idle(self, seconds: float) -> None:
        """Wait until the replica has been idle for `seconds`; after a failure, wait `seconds` in any case."""
        loop = asyncio.get_running_loop()
        since, seen = loop.time(), self._activity()
        while (left := since + seconds - loop.time()) > 0:
            await asyncio.sleep(min(left, _LONGEST_LOOK))
            if (now := self._activity()) != seen and not self._reason:
                since, seen = loop.time(), now

    async def _outcome(self, seconds: float) -> tuple[str, str]:
        """Run the probe; return one of `OUTCOMES`, and why the probe failed. Raises EngineAsleep."""
        try:
            async with asyncio.timeout(seconds):
                await self._probe()
        except TimeoutError:
            return "timeout", f"A request of its own took longer than {seconds:g} s."
        except EngineAsleep:
            raise
        except EngineError as error:
            log.error("the replica's request of its own failed: %s", error)
            return "failed", "A request of its own failed."
        return "ok", ""

    def _note(self, reason: str) -> None:
        if reason != self._reason:
            log.warning("%s", reason or "A request of the replica's own has succeeded.")
        self._reason = reason


def engine_probe(engine: Engine, *, prefill_only: bool, token: int = 1, speech: Speech | None = None) -> Probe:
    """Return a probe that computes one token after a prompt of one token; a model that only transcribes needs
    `speech`."""

    async def probe() -> None:
        request = GenerateRequest(
            request_id=f"canary-{uuid.uuid4().hex}",
            prompt_token_ids=(token % engine.info.vocab_size,),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            cache_salt=CANARY_SALT,
            prefill_only=prefill_only,
            media=speech,
        )
        async with aclosing(engine.generate(request)) as stream:
            await anext(stream)

    return probe


def encoder_probe(
    encode: Callable[[Sequence[MediaInput], str], Awaitable[object]], prompt: str = "", *, audio: bool = False
) -> Probe:
    """Return a probe that encodes one tiny image, or recording. `prompt`, if the encoder needs one, has a placeholder
    for it."""

    async def probe() -> None:
        media = MediaInput(tiny_recording(), kind="audio") if audio else MediaInput(tiny_image())
        await encode([media], prompt)

    return probe


def tiny_recording() -> bytes:
    """Return a WAV of a tenth of a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as silence:
        silence.setparams((1, 2, 16_000, 0, "NONE", ""))
        silence.writeframes(bytes(3_200))
    return file.getvalue()


def tiny_image() -> bytes:
    """Return a white PNG of 32 by 32 pixels."""
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\xff" * 3 * _SIDE) * _SIDE
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
