"""GET /v1/models and /version."""

from typing import Literal

from pydantic import BaseModel


class Model(BaseModel):
    """A served model; `max_model_len` is its context length in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trellis"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Version(BaseModel):
    version: str
