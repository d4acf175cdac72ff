"""The configuration models (pydantic) that `llm_args` has, built from the contract."""

import copy
import functools
import operator
import os
from enum import Enum
from typing import Annotated, Any, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from tensorrt_llm._contract import API, build_enum, parse_type
from tensorrt_llm._dataclasses import build_dataclass

MODULE = "tensorrt_llm.llmapi.llm_args"
_ALIASES = {"mpi_session": "_mpi_session", "speculative_model": "speculative_model_dir"}
_DECODING = API["enums"]["speculative_decoding_type_keys"]["1.2.1"]


def gpu_count() -> int:
    """GPUs that this machine pretends to have."""
    return int(os.environ.get("FAKE_TRTLLM_GPUS", "1"))


class Config(BaseModel):
    """What all models share: unknown fields are refused."""

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), validate_assignment=False
    )


class _LlmArgs(Config):
    @model_validator(mode="after")
    def _resolve(self) -> Self:
        """The values that 1.2.1 puts in the place of None."""
        resolved = {"gpus_per_node": gpu_count(), "max_batch_size": 2048, "max_input_len": 1024, "max_beam_width": 1}
        if "checkpoint_format" in type(self).model_fields:
            resolved["checkpoint_format"] = "HF"  # type: ignore[assignment]
        for name, value in resolved.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self


class _CudaGraphConfig(Config):
    @model_validator(mode="after")
    def _sizes(self) -> Self:
        sizes, largest = self.batch_sizes, self.max_batch_size  # type: ignore[attr-defined]
        if largest < 0 or (sizes and largest not in {0, max(sizes)}):
            raise ValueError("max_batch_size must be 0 or the largest of batch_sizes")
        return self


class _Decoding(Config):
    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The configuration whose class `decoding_type` names. Takes that key out of `data`, as the real one does."""
        kind = data.pop("decoding_type", None)
        if kind not in _DECODING:
            raise ValueError(f"Invalid decoding type: {kind}")
        return next(
            MODELS[name] for name, entry in API["models"].items() if entry.get("decoding_type_dict_key") == kind
        )(**data)


class _Sparse(Config):
    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The configuration whose class `algorithm` names. Takes that key out of `data`."""
        kind = data.pop("algorithm", None)
        for name, entry in API["models"].items():
            if "algorithm" in entry and entry["algorithm"] == kind:
                return MODELS[name](**data)
        raise ValueError(f"Invalid algorithm: {kind}")


class _AutoDeploy(Config):
    @model_validator(mode="after")
    def _parallelism(self) -> Self:
        """What AutoDeploy refuses."""
        for name in API["models"]["auto_deploy.LlmArgs"]["forbidden_non_default"]:
            field = type(self).model_fields.get(name)
            if field is not None and getattr(self, name) != field.get_default(call_default_factory=True):
                raise ValueError(f"AutoDeploy only supports world_size to control parallelism, not {name}")
        if self.max_beam_width > 1:  # type: ignore[attr-defined]
            raise ValueError("AutoDeploy does not support beam search")
        return self


def _from_dict(base: type[Any]) -> BeforeValidator:
    return BeforeValidator(lambda value: base.from_dict(copy.deepcopy(value)) if isinstance(value, dict) else value)


def _default(field: dict[str, Any], kind: Any) -> dict[str, Any]:
    if "default_factory" in field:
        factory = field["default_factory"]
        if factory.startswith("["):
            items = [item.strip("' ") for item in factory.strip("[]").split(",")]
            return {"default_factory": lambda: list(items)}
        return {"default_factory": {"dict": dict, "list": list, **MODELS}[factory]}
    if "default" not in field:
        return {}
    default = field["default"]
    if default == "<cuda device count>":
        default = gpu_count()
    elif default == "LoadFormat.AUTO":
        default = NAMES["LoadFormat"].AUTO
    elif isinstance(kind, type) and issubclass(kind, Enum):
        default = kind[default]
    return {"default": default}


def _build(name: str, bases: tuple[type[Any], ...], module: str = MODULE) -> Any:
    fields: dict[str, Any] = {}
    for field_name, field in API["models"][name]["fields"].items():
        kind = parse_type(field["type"], NAMES)
        options = _default(field, kind)
        if field.get("note") == "frozen":
            options["frozen"] = True
        if field_name in _ALIASES:
            options["validation_alias"] = AliasChoices(_ALIASES[field_name], field_name)
        fields[field_name] = (kind, Field(**options))
    model = create_model(name.rpartition(".")[2], __base__=bases, __module__=module, **fields)
    NAMES[model.__name__] = MODELS[name] = model
    return model


NAMES: dict[str, Any] = {
    name.rpartition(".")[2]: build_enum(name, MODULE)
    for name in API["enums"]
    if name.startswith(
        ("tensorrt_llm.llmapi.C", "tensorrt_llm.llmapi.B", "tensorrt_llm.llmapi.llm_args.", "GuidedDecodingConfig.")
    )
}
NAMES["LoraConfig"] = build_dataclass("LoraConfig")
MODELS: dict[str, Any] = {}

_ARGS = ("BaseLlmArgs", "TorchLlmArgs", "auto_deploy.LlmArgs")
_ROOTS: dict[str, type[Any]] = {"DecodingBaseConfig": _Decoding, "CudaGraphConfig": _CudaGraphConfig}


def _union(base: type[Any]) -> Any:
    """Any one of the models below `base`."""
    return functools.reduce(operator.or_, (model for model in MODELS.values() if issubclass(model, base)))


def _build_all() -> None:
    pending = [name for name in API["models"] if name not in _ARGS and not name.startswith(("newer-only", "serve."))]
    # A model comes after those that its fields name.
    for name in sorted(pending, key=lambda name: name == "SchedulerConfig"):
        entry = API["models"][name]
        root = _Sparse if "algorithm" in entry else _ROOTS.get(name, Config)
        _build(name, tuple(MODELS[base] for base in entry.get("bases", ())) or (root,))
    NAMES["SpeculativeConfig"] = Annotated[_union(_Decoding) | None, _from_dict(_Decoding)]
    NAMES["SparseAttentionConfig"] = Annotated[_union(_Sparse), _from_dict(_Sparse)]
    _build("BaseLlmArgs", (_LlmArgs,))
    _build("TorchLlmArgs", (MODELS["BaseLlmArgs"],))
    _build("auto_deploy.LlmArgs", (_AutoDeploy, MODELS["TorchLlmArgs"]), "tensorrt_llm._torch.auto_deploy.llm_args")


_build_all()
