"""The stand-in for TensorRT-LLM against the contract it is generated from: names, signatures, models, validation."""

import dataclasses
import enum
import inspect

import pytest

from tests.support.trtllm import API, PROMPT, disaggregated, found, llm, sampling, trt  # noqa: F401 - a fixture

ABSENT = (
    "AsyncLLM",
    "get_context_phase_params",
    "get_request_type",
    ".inputs.",
    "MetricsCollector",
    "KVCacheEventSerializer",
    ".serve.",
)
CALLABLES = [
    name for name in API["callables"] if not name.startswith("newer") and not any(part in name for part in ABSENT)
]
CALLABLES = [name for name in CALLABLES if not name.endswith("_collective_rpc")]
MODELS = [
    name
    for name in API["models"]
    if not name.startswith(("newer", "serve.")) and not name.endswith("GuidedDecodingConfig")
]
DATACLASSES = [
    "SamplingParams",
    "GuidedDecodingParams",
    "DisaggregatedParams",
    "CompletionOutput",
    "Logprob",
    "LoRARequest",
    "SchedulingParams",
]


@pytest.mark.parametrize("name", CALLABLES)
def test_signatures(name: str) -> None:
    stated, target = API["callables"][name], found(name)
    if "property" in stated.get("kind", ""):
        assert isinstance(target, property)
        return
    params = stated["params"]
    if stated.get("kind") == "classmethod":
        params = params[1:]
    expected = [(p["name"], p["kind"], p.get("default", inspect.Parameter.empty)) for p in params]
    assert [(p.name, p.kind.name, p.default) for p in inspect.signature(target).parameters.values()] == expected
    assert inspect.iscoroutinefunction(target) == stated["async"]


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_stated_fields_and_refuse_others(name: str) -> None:
    module = (
        "tensorrt_llm._torch.auto_deploy.llm_args" if name == "auto_deploy.LlmArgs" else "tensorrt_llm.llmapi.llm_args"
    )
    model = found(f"{module}.{name.rpartition('.')[2]}")
    for field_name, stated in API["models"][name]["fields"].items():
        field = model.model_fields[field_name]
        assert field.is_required() == stated.get("required", False), field_name
        if "default" in stated and stated["default"] not in ("LoadFormat.AUTO", "<cuda device count>"):
            default = field.get_default()
            assert (default.name if isinstance(default, enum.Enum) else default) == stated["default"], field_name
    with pytest.raises(ValueError, match="no_such_field"):
        model(no_such_field=1)
    for newer in API["models"][name].get("newer", ()):
        assert newer not in model.model_fields


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_have_the_stated_fields(name: str) -> None:
    entry = API["dataclasses"][name]
    made = found(f"{entry['module']}.{name}")
    init = {field.name: field for field in dataclasses.fields(made) if field.init}
    assert list(init) == list(entry["fields"])
    for field_name, stated in entry["fields"].items():
        assert init[field_name].default == stated.get("default", dataclasses.MISSING)
    assert ("__slots__" in vars(made)) == entry.get("slots", False)
    with pytest.raises(TypeError):
        made(no_such_field=1)


@pytest.mark.parametrize(
    "name",
    [
        "LLM.disaggregated_params", "LLM.preprocess", "LLM.encode", "llmapi.RequestOutput.aabort", "llmapi.CpConfig",
        "llmapi.PARDDecodingConfig", "disaggregated_params.DisaggScheduleStyle", "llmapi.Nonsense",
    ],
)  # fmt: skip
def test_the_stand_in_has_only_names_of_the_contract(name: str) -> None:
    with pytest.raises(AttributeError):
        found(f"tensorrt_llm.{name}")


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("tensorrt_llm.__version__") == "1.2.1"
    with pytest.raises(ValueError, match="LLM got invalid argument: model_kwargs"):
        llm(model_kwargs={})
    with pytest.raises(ValueError, match="tensorrt"):
        llm(backend="tensorrt")
    with pytest.raises(RuntimeError, match=r"Only 1 GPUs are available, but 2 are required\."):
        llm(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="world_size"):
        llm(backend="_autodeploy", tensor_parallel_size=2)
    monkeypatch.setenv("FAKE_TRTLLM_GPUS", "2")
    with llm(tensor_parallel_size=2) as two:
        with pytest.raises(TypeError, match="priority"):
            two.generate_async(PROMPT, priority=1)
        with pytest.raises(TypeError, match="inputs"):
            two.generate_async()
        with pytest.raises(TypeError):
            two.generate_async(5, sampling())
    llm(backend="_autodeploy").shutdown()


def test_sampling_params_are_validated() -> None:
    for wrong in (
        {"top_p": 2},
        {"top_k": -1},
        {"temperature": -1},
        {"n": 2, "best_of": 1},
        {"truncate_prompt_tokens": 0},
        {"n": 2},
    ):
        with pytest.raises(ValueError):
            sampling(**wrong)
    guide = found("tensorrt_llm.llmapi.GuidedDecodingParams")(regex="a", json_object=True)
    with pytest.raises(ValueError, match="guide"):
        sampling(guided_decoding=guide)
    with pytest.raises(ValueError):
        disaggregated("neither")
    with pytest.raises(ValueError, match="Invalid decoding type"):
        llm(speculative_config={"decoding_type": "Eagle3"})
    with pytest.raises(ValueError, match="lora_path"):
        found("tensorrt_llm.llmapi.LoRARequest")("a", 1)
