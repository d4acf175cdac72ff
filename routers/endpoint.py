"""A generating API as a record: its route, its OpenAPI entry and the router's proxy are made from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from multimodal.answers.shapes import Shape
from multimodal.request import Ask
from protocol.common import GenerationFields
from routers.body import converted, json_body, request_body, while_connected
from routers.sse import OPENAI, EventStream, Framing
from routers.state import ChatService, ChatServiceDep, DpRank, RequestId, StateDep

B = TypeVar("B", bound=GenerationFields)


@dataclass(frozen=True, kw_only=True)
class Endpoint(Generic[B]):
    """One generating API. A new one is its wire types in `protocol/`, a file here with its record, and a place in
    `ENDPOINTS`.
    """

    path: str
    name: str
    """Summary of the operation in the OpenAPI document."""
    summary: str
    description: str
    body: type[B]
    answer: type[BaseModel]
    """The answer that is not streamed, for the OpenAPI document."""
    chunk: str
    """Name of the class in `protocol/chunks.py` that describes an event of a streamed answer."""
    convert: Callable[[B], Ask]
    """Return the neutral request of a body. Raises RequestError."""
    shape: type[Shape]
    framing: Framing = OPENAI

    def router(self) -> APIRouter:
        """Return a router with this route."""
        router = APIRouter(tags=["generation"])
        parse = json_body(self.body)

        @router.post(
            self.path,
            name=self.name,
            response_model=self.answer,
            summary=self.summary,
            description=self.description,
            openapi_extra=request_body(self.body),
        )
        async def generate(
            request: Request,
            state: StateDep,
            service: ChatServiceDep,
            request_id: RequestId,
            dp_rank: DpRank,
            body: Annotated[Any, Depends(parse)],
        ) -> Response:

            def convert() -> Ask:
                service.fields.check(body)
                return self.convert(body)

            ask = await converted(state, convert)
            if not ask.stream:
                content = await while_connected(request, self._complete(service, ask, request_id, dp_rank))
                return Response(content, media_type="application/json")
            generation = await while_connected(request, service.processor.prepare(ask, self.shape, request_id, dp_rank))
            return EventStream(generation.stream(), self.framing, state["http"].ping_interval, state["render_error"])

        return router

    async def _complete(self, service: ChatService, ask: Ask, request_id: str, dp_rank: int | None) -> bytes:
        return await (await service.processor.prepare(ask, self.shape, request_id, dp_rank)).complete()
