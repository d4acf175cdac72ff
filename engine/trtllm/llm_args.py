"""The arguments of TensorRT-LLM 1.2.1's `LLM`, as models that refuse what it would refuse, before a GPU is needed.

`llm_args.json` holds for each model, after those that it uses, its fields as `[type, default]`, or `[type]` for a
required one; `Name(Base)` derives a model. Names, order, types and defaults are those of `tensorrt_llm.llmapi.llm_args`;
a test holds them against the contract. `mpi_session` is left out: it is an object of the caller's own. The contract
dates `AutoDeployLlmArgs` after 1.2.1, so that this model says no more than which names are known.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model


class Arguments(BaseModel):
    """Unknown fields are errors, as they are there."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), validate_default=True)


def _models() -> dict[str, type[Arguments]]:
    models: dict[str, type[Arguments]] = {}
    names = {"AliasChoices": AliasChoices, "Annotated": Annotated, "Any": Any, "Field": Field, "Literal": Literal}
    for title, fields in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items():
        name, _, base = title.removesuffix(")").partition("(")
        parts: dict[str, Any] = {field: (kind, *(default or [...])) for field, (kind, *default) in fields.items()}
        models[name] = create_model(name, __base__=models.get(base, Arguments), __module__=__name__, **parts)
        models[name].model_rebuild(_types_namespace=names | models)
    return models


MODELS = _models()
"""The models by name."""
