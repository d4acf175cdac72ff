"""The adapter's source uses only names, keywords and attributes that TensorRT-LLM 1.2.1 has.

`test_contract_values.py` checks what builders make, which is not in the source.
"""

import ast
import functools
import json
from pathlib import Path

import pytest

from tests.support.trtllm_contract_walker import Findings, Walker, untyped

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "engine" / "trtllm").glob("*.py"))
ADAPTER = [path for path in FILES if path.name != "visual.py"]
"""But for what 1.2.1 lacks: `test_visual.py`."""
HELD = {
    "llm": "LLM",
    "self.llm": "LLM",
    "encoder": "MultimodalEncoder",
    "self._encoder": "MultimodalEncoder",
    "result": "RequestOutput",
    "run.result": "RequestOutput",
    "self.result": "RequestOutput",
    "output": "CompletionOutput",
    "params": "DisaggregatedParams",
}
"""Expressions of the adapter's that hold TensorRT-LLM's objects, by their text."""
HELD_IN = {
    "outputs.py": {"value": "Logprob", "item[1]": "Logprob"},
    "performance.py": {"metrics": "RequestPerfMetrics"},
    "probe.py": {"context": "LLM"},
    "polling.py": {"self._call": "LLM.get_kv_cache_events"},  # or get_stats, of the same signature
    "watching.py": {"self._llm": "LLM"},
}
NOT_THEIRS = {
    "arguments.py": {"value"}, "engine.py": {"work"}, "polling.py": {"value"}, "library.py": {"bias"},
    "outputs.py": {"entry"}, "processors.py": {"logits"},
    "probe.py": {"arguments", "fields", "logits", "stream_ptr", "client_id"},
}  # fmt: skip
"""What is said to be `Any` and is not TensorRT-LLM's, or a container of what is."""


def walked(file: str, source: str) -> Findings:
    return Walker(file, HELD | HELD_IN.get(file, {})).walk(source)


@functools.cache
def adapter() -> dict[str, Findings]:
    return {path.name: walked(path.name, path.read_text(encoding="utf-8")) for path in ADAPTER}


def test_the_adapter_asks_for_nothing_that_the_contract_lacks() -> None:
    assert [fault for findings in adapter().values() for fault in findings.faults] == []


def test_every_object_of_theirs_is_followed() -> None:
    """Nothing untyped goes unnoticed, and no entry of the tables is out of date."""
    for path in ADAPTER:
        known = {*HELD, *HELD_IN.get(path.name, {}), *NOT_THEIRS.get(path.name, ())}
        assert set(untyped(ast.parse(path.read_text(encoding="utf-8")))) <= known, path.name
    assert HELD.keys() <= {text for findings in adapter().values() for text in findings.held}
    assert all(held.keys() <= adapter()[file].held for file, held in HELD_IN.items())


def test_names_that_syntax_cannot_check_are_covered_by_other_tests() -> None:
    for name, expected in {
        "starred": {"LLM", "MultimodalEncoder", "SamplingParams", "GuidedDecodingParams", "DisaggregatedParams"},
        "dynamic": {"DisaggregatedParams"},
        "passed_on": {"tensorrt_llm.LLM.get_stats", "tensorrt_llm.LLM.get_kv_cache_events"},
    }.items():
        assert {item for findings in adapter().values() for item in getattr(findings, name)} == expected


def test_every_behaviour_of_the_contract_has_its_source_and_its_tests() -> None:
    """`tests/contract/trtllm_behaviours.json`: what signatures do not say, and the stand-in imitates."""
    behaviours = json.loads((ROOT / "tests" / "contract" / "trtllm_behaviours.json").read_text(encoding="utf-8"))
    for behaviour in behaviours:
        assert behaviour.keys() == {"id", "fact", "source", "sure", "tests"} and all(behaviour.values())
        for test in behaviour["tests"]:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), test


def test_no_other_file_imports_the_package_and_none_does_so_by_a_string() -> None:
    for folder in ("server", "routers", "multimodal", "engine", "protocol"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if "tensorrt_llm" not in source:
                continue
            calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            by_string = [ast.unparse(call) for call in calls if "import" in ast.unparse(call.func)]
            assert not any("tensorrt_llm" in call for call in by_string), path
            if path not in FILES:
                assert Walker(path.name, {}).walk(source).faults == [] and "import tensorrt_llm" not in source, path
                assert "from tensorrt_llm" not in source, path


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from tensorrt_llm.llmapi import AsyncEngine", "tensorrt_llm.llmapi has no AsyncEngine"),
        ("from tensorrt_llm.executor import RequestError", "tensorrt_llm.executor has no RequestError"),
        ("import tensorrt_llm.llmapi", "imports the module"),
        ("from tensorrt_llm import SamplingParams as P\nP(max_tokens=1, max_new_tokens=1)", "max_new_tokens"),
        ("from tensorrt_llm import SamplingParams\nSamplingParams(5)", "too many positional arguments"),
        ("from tensorrt_llm.llmapi import DisaggregatedParams as D\nD(**k, disagg_request_id=1)", "disagg_request_id"),
        ("from tensorrt_llm.llmapi.llm_args import update_llm_args_with_extra_dict as u\nu({})", "llm_args_dict"),
        (
            "from tensorrt_llm import LLM\nasync def f(p):\n"
            "    with LLM(model=p) as x:\n        pass\n    LLM(p).encode(p)",
            "LLM has no encode",
        ),
        ("llm.generate_async(inputs=[1], priority=1)", "priority"),
        ("llm.generate_async([1])", "keywords only"),
        ("llm.generate_async(*inputs)", "positional arguments by *"),
        ("llm.preprocess([1])", "LLM has no preprocess"),
        (
            "async def f():\n    async for step in llm.generate_async(inputs=[1]):\n        await step.aabort()",
            "RequestOutput has no aabort",
        ),
        ("llm._executor.shutdown()", "LLM has no _executor"),
        ("llm.shutdown(timeout=1)", "timeout"),
        (
            "a, b = llm.args, 1\na.kv_cache_config.use_kv_cache_manager_v2",
            "KvCacheConfig has no use_kv_cache_manager_v2",
        ),
        ("run.result.finished()", "RequestOutput.finished is no method"),
        ("encoder.generate_async(inputs={}, disaggregated_params=None)", "disaggregated_params"),
        ("[out.tokens for out in result.outputs]", "CompletionOutput has no tokens"),
        ("result.outputs.first", "CompletionOutput has no first"),
        ("x = result.outputs[0].disaggregated_params\nx.ctx_dp_rank = 1", "DisaggregatedParams has no ctx_dp_rank"),
        ("getattr(params, 'schedule_style', None)", "DisaggregatedParams has no schedule_style"),
        ("if (o := result.outputs[0]).finish_reason in ('abort', 'stop'): pass", "no finish_reason is 'abort'"),
    ],
)
def test_the_walker_notices(source: str, fault: str) -> None:
    (found,) = walked("snippet.py", source).faults
    assert fault in found


def test_the_walker_notices_a_method_that_is_not_called() -> None:
    assert walked("snippet.py", "if result.aborted: pass").passed_on == {
        "tensorrt_llm.executor.GenerationResult.aborted"
    }
