"""GET /v1/models: the one model that this replica serves."""

from fastapi import APIRouter

from multimodal.errors import ModelNotFound
from protocol.models import Model, ModelList
from routers.state import State, StateDep

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", summary="List the models")
async def list_models(state: StateDep) -> ModelList:
    return ModelList(data=[_model(state)])


@router.get("/{model_id:path}", summary="One model")
async def get_model(model_id: str, state: StateDep) -> Model:
    if model_id != state["replica"].model_name:
        raise ModelNotFound(state["replica"].model_name)
    return _model(state)


def _model(state: State) -> Model:
    replica = state["replica"]
    assert replica.engine is not None, "the gate lets no request in before the engine is there"
    name, length = replica.model_name, replica.engine.info.context_length
    return Model(id=name, created=replica.created, root=name, max_model_len=length, runtime=state["runtime"]())
