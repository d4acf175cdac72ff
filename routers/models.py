"""GET /v1/models: the one model that this replica serves."""

from http import HTTPStatus

from fastapi import APIRouter, HTTPException

from multimodal.errors import ModelNotFound
from protocol.models import Model, ModelList
from routers.state import ChatService, ModelServiceDep, State, StateDep, VisualService

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", summary="List the models")
async def list_models(state: StateDep, service: ModelServiceDep) -> ModelList:
    return ModelList(data=[_model(state, service)])


@router.get("/{model_id:path}", summary="One model")
async def get_model(model_id: str, state: StateDep, service: ModelServiceDep) -> Model:
    if not model_id:
        raise HTTPException(HTTPStatus.NOT_FOUND)  # no model's name: `server/http/routes.py` says which route was meant
    if model_id != (served := state["replica"].model_name):
        raise ModelNotFound(model_id, served)
    return _model(state, service)


def _model(state: State, service: ChatService | VisualService) -> Model:
    name = state["replica"].model_name
    length = service.engine.info.context_length if isinstance(service, ChatService) else None
    created = state["replica"].created
    return Model(id=name, created=created, root=name, max_model_len=length, runtime=state["runtime"]())
