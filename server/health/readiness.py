"""What readiness depends on besides the engine itself: peers that the role needs, the event loop, and the canary."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from engine.base import Engine
from engine.encoder import Encoder, PromptEncoder
from engine.replicas.encode_service import EncodeService
from multimodal.errors import RequestError
from routers.state import ReplicaState
from server.compose import engine as compose
from server.health.canary import Canary, Probe, encoder_probe, engine_probe, prompt_encoder_probe
from server.health.watchdog import Watchdog
from server.metrics.page import ServerMetrics
from server.metrics.replica import ReplicaMetrics
from server.process.tasks import background, in_thread
from server.settings import Settings

_LOOK_SECONDS = 0.25

log = logging.getLogger(__name__)


class Health:
    """The checks of one API process; each part is added once it has started."""

    def __init__(self, settings: Settings, metrics: ServerMetrics, replica: ReplicaState) -> None:
        self._settings = settings
        self._role = settings.disaggregation_mode
        self._server_metrics = metrics
        self._replica = replica
        self._metrics = ReplicaMetrics(metrics.registry, replica.model_name, self._role, settings.engine)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the event loop and measure readiness, meanwhile."""
        watchdog = Watchdog(self._settings.watchdog_seconds, self._metrics.blocked)
        self._replica.checks["event_loop"] = watchdog.reason
        async with watchdog.watching(), background(self._measure(), "readiness"):
            yield

    async def add_engine(self, local: Engine, serving: Engine, stack: AsyncExitStack) -> None:
        """`local` computes here, `serving` is what requests go to. What is run for them ends with `stack`."""
        self._replica.checks["engine"] = lambda: (
            "" if local.healthy else "The engine is restarting, or does not answer."
        )
        if self._role == "decode":
            self._add_prefill_peers(serving)
        await self._add_canary(
            engine_probe(local, self._role), lambda: self._server_metrics.iteration, lambda: local.healthy, stack
        )

    async def add_encoders(
        self,
        encoder: Encoder | None,
        prompt_encoder: PromptEncoder | None,
        service: EncodeService | None,
        folder: Path | None,
        stack: AsyncExitStack,
    ) -> None:
        """What encodes images, for this replica's chats or, by `service`, for others."""
        one = encoder or prompt_encoder
        if one is None:
            return
        if self._role == "encode":
            assert service is not None, "an encode replica encodes"
            probe = encoder_probe(encoder) if encoder else await self._prompt_probe(prompt_encoder, folder)
            if probe is not None:
                await self._add_canary(probe, lambda: service.served, lambda: one.healthy, stack)
        elif self._role != "prefill" and self._settings.encode_urls:
            self._add_encode_peers(one)

    def _add_prefill_peers(self, serving: Engine) -> None:
        from engine.replicas.prefill_engine import DisaggregatedEngine  # noqa: PLC0415 - most replicas do without

        assert isinstance(serving, DisaggregatedEngine), "a decode replica's"
        self._replica.peers["prefill"] = lambda: serving.pool.counts
        if serving.min_tokens is None:
            self._replica.checks["prefill_peers"] = lambda: (
                "" if serving.pool.healthy(serving.common) else "No prefill replica answers."
            )

    def _add_encode_peers(self, encoder: Encoder | PromptEncoder) -> None:
        from engine.replicas.encoders import EncoderPool, PromptEncoderPool  # noqa: PLC0415 - most replicas do without

        assert isinstance(encoder, EncoderPool | PromptEncoderPool), "with ENCODE_URLS"
        # No check: once it has started, chats without images and with known ones are answered without them.
        self._replica.peers["encode"] = lambda: encoder.counts

    async def _add_canary(
        self, probe: Probe, activity: Callable[[], int], up: Callable[[], bool], stack: AsyncExitStack
    ) -> None:
        if not self._settings.canary_seconds:
            return
        canary = Canary(probe, activity, up, self._metrics.canary)
        self._replica.checks["canary"] = canary.reason
        run = canary.run(self._settings.canary_seconds, self._settings.canary_timeout_seconds)
        await stack.enter_async_context(background(run, "canary"))

    async def _prompt_probe(self, encoder: PromptEncoder | None, folder: Path | None) -> Probe | None:
        """None if the model has no chat template that shows an image: nothing else tells its placeholder."""
        assert encoder is not None, "one of the two"
        _, template = await in_thread(partial(compose.load_text, self._settings, folder))
        message = {"role": "user", "content": [{"type": "image"}]}
        try:
            if template is not None:
                return prompt_encoder_probe(encoder, template.render([message], add_generation_prompt=True))
        except RequestError as error:
            log.debug("the chat template shows no image", exc_info=error)
        log.warning("no canary: the model's chat template shows no image")
        return None

    async def _measure(self) -> None:
        while True:
            self._metrics.ready(self._replica.ready)
            await asyncio.sleep(_LOOK_SECONDS)
