"""A worker of a Dynamo graph that encodes the images of requests, before others compute tokens."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from dynamo.llm import ModelRuntimeConfig, ModelType
from dynamo.llm.exceptions import EngineShutdown, HttpError
from dynamo.runtime import Context

from engine.errors import EngineError
from engine.kit.tasks import cancel
from engine.replicas.encode_answers import EncodeService
from protocol.dynamo import DynamoRequest
from routers.dynamo.convert import CANCELLED, image_refs
from routers.dynamo.images import GraphImages, OfferedEmbeddings
from routers.dynamo.worker import LEASE, PROBE, Card, DynamoGraph, GraphWorker, Served, translated
from routers.state import ReplicaState


class EncodeWorker(GraphWorker):
    """The worker of an encode replica. Its answer says where the embeddings are, and is handed to the others unread."""

    def __init__(
        self,
        graph: DynamoGraph,
        service: EncodeService,
        replica: ReplicaState,
        card: Card,
        images: GraphImages,
        offered: OfferedEmbeddings,
        *,
        seconds: float,
        drain_seconds: float,
    ) -> None:
        super().__init__(graph, "encode", replica, card, drain_seconds)
        self._service = service
        self._images = images
        self._offered = offered
        self._seconds = seconds

    async def _release(self) -> None:
        self._offered.close()
        await self._images.close()

    def _further(self) -> tuple[Served, ...]:
        return ((self._graph.endpoint(LEASE), self._lease, None),)

    def _facts(self, facts: ModelRuntimeConfig) -> tuple[ModelType, int | None]:
        facts.enable_local_indexer = False
        facts.kv_event_publishing_enabled = False
        return ModelType.Empty, None

    def _probe(self) -> dict[str, Any]:
        return {"token_ids": [], PROBE: True}

    async def _generate(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        """Serve `generate`: one output, with the encoded images."""
        with self._counted():
            asked, probe = self._read(body)
            if not self._service.healthy:
                raise EngineShutdown("the encoder is restarting, or closing")
            result: dict[str, str] = {}
            if not probe:
                work = asyncio.create_task(self._encoded(asked))
                stopped: asyncio.Future[Any] = context.async_killed_or_stopped()
                either: set[asyncio.Future[Any]] = {work, stopped}
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopped.cancel()
                    await cancel([work])
                if work.cancelled():
                    yield CANCELLED
                    return
                result = work.result()
            yield {"token_ids": [], "index": 0, "finish_reason": "stop", "encoder_result": result}

    async def _encoded(self, asked: DynamoRequest) -> dict[str, str]:
        try:
            async with asyncio.timeout(self._seconds):
                refs = image_refs(asked)
                with self._service.counting(len(refs)):
                    media = await self._images.load(refs)
                return await self._offered.offer(media)
        except EngineError as error:
            raise translated(error) from None  # Dynamo logs the whole chain
        except TimeoutError:
            raise HttpError(504, "the images were not ready in time") from None

    async def _lease(self, body: Any, context: Context) -> AsyncGenerator[Mapping[str, Any], None]:
        """Serve `lease`: another worker has read embeddings."""
        yield {"held": self._offered.free(str(body.get("lease"))) if isinstance(body, dict) else False}
