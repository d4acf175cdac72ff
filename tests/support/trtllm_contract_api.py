"""The classes and functions of `contract/trtllm_api.json`.

It says who has which members, of which types, and how they are called.
"""

import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

API = json.loads((Path(__file__).resolve().parents[1] / "contract" / "trtllm_api.json").read_text(encoding="utf-8"))
PACKAGE = "tensorrt_llm"
LLMAPI = (
    "LLM",
    "MultimodalEncoder",
    "SamplingParams",
    "GuidedDecodingParams",
    "DisaggregatedParams",
    "RequestOutput",
    "RequestError",
)
"""Names to import from `tensorrt_llm.llmapi`, as far as an adapter could want them.

Two of them are also at the top level.
"""


@dataclass(frozen=True)
class Kind:
    """An object of TensorRT-LLM's.

    It is an instance of the class `name`, a list of instances, the class itself, or a function or method.
    """

    name: str
    form: str = "object"


def _params(name: str) -> list[dict[str, Any]]:
    params: list[dict[str, Any]] = API["callables"][name]["params"]
    return params


def _callables(prefix: str) -> dict[str, str]:
    return {
        name.removeprefix(prefix): name
        for name in API["callables"]
        if name.startswith(prefix) and "." not in name[len(prefix) :]
    }


def _fields(model: str) -> dict[str, str]:
    entry = API["models"][model]
    inherited = [item for base in entry.get("bases", ()) for item in _fields(base).items()]
    return {**dict(inherited), **{name: stated["type"] for name, stated in entry["fields"].items()}}


def _dataclass(name: str) -> dict[str, str]:
    entry = API["dataclasses"][name]
    return {name: stated["type"] for name, stated in entry["fields"].items()} | dict.fromkeys(
        entry.get("properties", ()), "value"
    )


_RESULT = API["classes"]["tensorrt_llm.llmapi.RequestOutput"]
_MEASURED = API["json_schemas"]["perf_metrics_item"]["perf_metrics"]
ATTRIBUTES: dict[str, dict[str, str]] = {
    "LLM": {"args": "TorchLlmArgs"},  # a public member, by the prose of the contract
    "MultimodalEncoder": {"args": "TorchLlmArgs"},
    "RequestOutput": {name: text for name, text in _RESULT["attributes"].items() if name not in _RESULT["methods"]},
    "IterationResult": {},
    "RequestPerfMetrics": {name: name if isinstance(value, dict) else "value" for name, value in _MEASURED.items()},
    **{name: dict.fromkeys(value, "value") for name, value in _MEASURED.items() if isinstance(value, dict)},
    "RequestError": {},
    **{
        name: _dataclass(name)
        for name in (
            "CompletionOutput",
            "DisaggregatedParams",
            "Logprob",
            "SamplingParams",
            "SchedulingParams",
            "GuidedDecodingParams",
        )
    },
    **{name: _fields(name) for name in API["models"] if not name.startswith(("newer-only", "serve.", "auto_deploy"))},
}
"""For each class its attributes with the contract's text of their types."""
METHODS: dict[str, dict[str, str]] = {
    "LLM": _callables("tensorrt_llm.LLM."),
    "MultimodalEncoder": _callables("tensorrt_llm.LLM.") | _callables("tensorrt_llm.llmapi.MultimodalEncoder."),
    "RequestOutput": {name: f"tensorrt_llm.executor.GenerationResult.{name}" for name in _RESULT["methods"]},
    "IterationResult": _callables("tensorrt_llm.executor.IterationResult."),
    "SamplingParams": _callables("tensorrt_llm.sampling_params.SamplingParams."),
    "DisaggregatedParams": _callables("tensorrt_llm.disaggregated_params.DisaggregatedParams."),
}
FINISH_REASONS = frozenset(API["enums"]["finish_reason"]["members"])


def imported(module: str, name: str) -> Kind | None:
    """What `from module import name` gets; None if the contract has no such thing."""
    if name in LLMAPI and (
        module == "tensorrt_llm.llmapi" or (module == PACKAGE and name in ("LLM", "SamplingParams"))
    ):
        return Kind(name, "class")
    if (module, name) == ("tensorrt_llm._torch.auto_deploy", "LLM"):
        return Kind("LLM", "class")
    if (module, name) == ("tensorrt_llm.scheduling_params", "SchedulingParams"):
        return Kind("SchedulingParams", "class")
    if f"{module}.{name}" in ("tensorrt_llm.executor.result.Logprob", "tensorrt_llm.inputs.utils.VideoData"):
        return Kind(name, "class")
    return Kind(f"{module}.{name}", "function") if f"{module}.{name}" in API["callables"] else None


def signature(name: str, drop: int = 0) -> inspect.Signature:
    """Of a callable of the contract, less its first `drop` parameters."""
    return inspect.Signature(
        [
            inspect.Parameter(
                entry["name"],
                getattr(inspect.Parameter, entry["kind"]),
                default=entry.get("default", inspect.Parameter.empty),
            )
            for entry in _params(name)[drop:]
        ]
    )


def constructor(name: str) -> inspect.Signature:
    """Of a class of the contract."""
    if f"{PACKAGE}.{name}.__init__" in API["callables"]:
        return signature(f"{PACKAGE}.{name}.__init__", drop=1)
    if f"{PACKAGE}.llmapi.{name}.__init__" in API["callables"]:
        return signature(f"{PACKAGE}.llmapi.{name}.__init__", drop=1)
    entry = API["dataclasses"][name]
    how = inspect.Parameter.KEYWORD_ONLY if entry.get("kw_only") else inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = {True: inspect.Parameter.empty, False: None}
    fields = entry["fields"].items()
    return inspect.Signature(
        [inspect.Parameter(field, how, default=required[facts.get("required", False)]) for field, facts in fields]
    )


def has(name: str, member: str) -> bool:
    """Whether the class `name` has such an attribute or method."""
    return member in ATTRIBUTES[name] or member in METHODS.get(name, {})


def kind_of(text: str) -> Kind | None:
    """What a value of a type of the contract is, as far as it is anything to follow."""
    names = [name for name in re.findall(r"\w+", text) if name in ATTRIBUTES]
    return Kind(names[0], "list" if text.startswith("List[") else "object") if names else None
