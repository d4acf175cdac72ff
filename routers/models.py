"""GET /v1/models: the one model that this replica serves."""

from fastapi import APIRouter

from multimodal.errors import ModelNotFound
from protocol.models import Model, ModelList
from routers.state import Replica, ReplicaDep

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", summary="List the models")
async def list_models(replica: ReplicaDep) -> ModelList:
    return ModelList(data=[_model(replica)])


@router.get("/{model_id:path}", summary="One model")
async def get_model(model_id: str, replica: ReplicaDep) -> Model:
    if model_id != replica.model_name:
        raise ModelNotFound(replica.model_name)
    return _model(replica)


def _model(replica: Replica) -> Model:
    assert replica.engine is not None, "the gate lets no request in before the engine is there"
    info = replica.engine.info
    return Model(id=replica.model_name, created=replica.created, root=replica.model_name, max_model_len=info.context_length)
