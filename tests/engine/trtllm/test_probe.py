"""The probe's checks, on a stand-in that behaves one way and then the other: each can be confirmed and refuted."""

import asyncio
import json
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.process import tree
from engine.trtllm import probe
from tests.support import trtllm_gotchas as trtllm_gotchas_support
from tests.support.trtllm import NEWEST, faults, found, model_folder
from tests.support.waiting import slowness

trt = trtllm_gotchas_support.trt  # a fixture
CONFIRMED, REFUTED = "confirmed", "refuted"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path, vocab_size=512)


RESULT = "tensorrt_llm._results.GenerationResult"


def method(owner: str, name: str) -> Any:
    """A method of the stand-in's, to be called by another in its place."""
    return getattr(found(owner), name)


@pytest.fixture(autouse=True)
def closing(trt: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group's process ends without a shutdown; here LLMs are shut down after it."""
    made: list[Any] = []
    load = method("tensorrt_llm._llm.BaseLLM", "_load")

    def keep(self: Any, kwargs: dict[str, Any]) -> None:
        load(self, kwargs)
        made.append(self)

    monkeypatch.setattr(found("tensorrt_llm._llm").BaseLLM, "_load", keep)
    monkeypatch.setattr(probe, "GRACE_SECONDS", 0.3 * slowness())
    monkeypatch.setattr(probe, "POLL_SECONDS", 0.1 * slowness())
    faults().longest_poll_seconds = None
    yield
    found("tensorrt_llm._test").reset()
    for llm in made:
        llm.shutdown()


def examined(name: str, folder: Path) -> dict[str, str]:
    """The verdicts of a group."""
    found: dict[str, str] = {}

    def note(check: str, verdict: Any, evidence: str) -> None:
        assert evidence and check in probe.GROUPS[name].checks
        found[check] = verdict if isinstance(verdict, str) else CONFIRMED if verdict else REFUTED

    asyncio.run(probe.GROUPS[name].run(str(folder), note, lambda check: None))
    assert found.keys() == set(probe.GROUPS[name].checks)
    return found


@pytest.fixture
def requests_changed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change what every request asks for, and the output of its result, by functions."""

    def change(
        before: Callable[[dict[str, Any]], None] = lambda call: None,
        after: Callable[[Any], None] = lambda output: None,
    ) -> None:
        generate = found("tensorrt_llm.LLM").generate_async
        handle = method(RESULT, "_handle")

        def generate_async(self: Any, **call: Any) -> Any:
            before(call)
            return generate(self, **call)

        def handled(self: Any, response: Any) -> None:
            handle(self, response)
            for output in self.outputs:
                after(output)

        monkeypatch.setattr(found("tensorrt_llm.LLM"), "generate_async", generate_async)
        monkeypatch.setattr(found("tensorrt_llm._results").GenerationResult, "_handle", handled)

    return change


def ignoring(*names: str) -> Callable[[dict[str, Any]], None]:
    def before(call: dict[str, Any]) -> None:
        for name in names:
            setattr(call["sampling_params"], name, None)

    return before


def other_answer_if(*names: str) -> Callable[[dict[str, Any]], None]:
    """The stand-in repeats the prompt: one token fewer of it is another answer."""

    def before(call: dict[str, Any]) -> None:
        if any(getattr(call["sampling_params"], name) for name in names):
            call["inputs"] = call["inputs"][1:]

    return before


def draws(call: dict[str, Any]) -> None:
    """Whatever the seed."""
    if call["sampling_params"].temperature:
        random.shuffle(call["inputs"])


def calls_processor(lag: int) -> Callable[[dict[str, Any]], None]:
    """As many tokens as there are, or fewer."""

    def before(call: dict[str, Any]) -> None:
        if (processor := call["sampling_params"].logits_processor) is not None:
            call["sampling_params"].logits_processor = None
            for place in range(3):
                seen = len(call["inputs"]) + max(0, place - lag)
                processor(1, None, [[0] * seen], None, None)

    return before


def not_own(output: Any) -> None:
    output.prompt_logprobs = [{511: None} for _ in output.prompt_logprobs]


class Tail:
    """Cuts the second list of prompt log-probabilities."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, output: Any) -> None:
        if output.prompt_logprobs and output not in self.seen:
            self.seen.append(output)
            output.prompt_logprobs = output.prompt_logprobs[: 5 if len(self.seen) > 1 else None]


def whole(output: Any) -> None:
    """Every token of the prompt, cached or not."""
    if output.prompt_logprobs:
        output.prompt_logprobs = [{token: None} for token in reversed(probe.PROMPT[:-1])]


def lasts(call: dict[str, Any]) -> None:
    """`min_tokens` counts new tokens; a guide cannot be used."""
    params = call["sampling_params"]
    if params.min_tokens:
        params.ignore_eos, params.min_tokens = True, None
    if params.guided_decoding is not None:
        raise ValueError("no guide")


PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
GUIDED = ("guided_decoding",)


def no_metrics(output: Any) -> None:
    output.request_perf_metrics = None


def all_of(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for one in changes:
            one(value)

    return change


SINGLE = {"A3.penalties", "A3.bad_words", "A3.seed", "A7", "A8", "A16"}


def test_single_requests_that_are_as_the_contract_says(folder: Path, requests_changed: Callable[..., None]) -> None:
    ignored = ignoring(*PENALTIES, *GUIDED, "bad_token_ids", "min_tokens")
    requests_changed(all_of(ignored, draws, calls_processor(1)), all_of(not_own, Tail()))
    verdicts = examined("requests", folder)
    wanted = SINGLE | {"A6.own", "A6.cached", "A14"}
    assert {check for check in wanted if verdicts[check] != CONFIRMED} == set()


def test_single_requests_that_are_otherwise(folder: Path, requests_changed: Callable[..., None]) -> None:
    honoured = other_answer_if(*PENALTIES, "bad_token_ids")
    requests_changed(all_of(honoured, ignoring("temperature"), calls_processor(0), lasts), all_of(no_metrics, whole))
    verdicts = examined("requests", folder)
    wanted = SINGLE | {"A6.own", "A6.cached", "A14"}
    assert {check for check in wanted if verdicts[check] != REFUTED} == set()


@pytest.mark.parametrize(("verdict", "blocks"), [(CONFIRMED, True), (REFUTED, False)])
def test_polls(verdict: str, blocks: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not blocks:  # as newer versions
        monkeypatch.setattr(found("tensorrt_llm.LLM"), "get_stats_async", lambda self, timeout: None)
    assert examined("requests", folder)["A2"] == verdict


@pytest.mark.parametrize(("verdict", "window"), [(CONFIRMED, None), (REFUTED, 4096)])
def test_the_window(verdict: str, window: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = found("tensorrt_llm._executor").event_item
    changed = {} if window is None else {"window_size": window}
    monkeypatch.setattr(found("tensorrt_llm._executor"), "event_item", lambda *about: item(*about) | changed)
    assert examined("requests", folder)["A18"] == verdict


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request gets no answer any more."""
    result = found("tensorrt_llm._results").GenerationResult
    push = method(RESULT, "_push")
    monkeypatch.setattr(result, "_push", lambda self, response: None if self.aborted() else push(self, response))


def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    result = found("tensorrt_llm._results").GenerationResult
    abort = method(RESULT, "abort")

    def answer(self: Any) -> None:
        abort(self)
        self._push(RuntimeError("cancelled"))

    monkeypatch.setattr(result, "abort", answer)


@pytest.mark.parametrize(("verdict", "change"), [(CONFIRMED, silent), (REFUTED, answering)])
def test_aborts(verdict: str, change: Callable[[Any], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    assert examined("requests", folder)["A15"] == verdict


@pytest.mark.parametrize(("verdict", "ends"), [(CONFIRMED, True), (REFUTED, False)])
def test_roles(verdict: str, ends: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate_async(self: Any, **call: Any) -> Any:
        asked = call.pop("disaggregated_params", None)
        result = generate(self, **call)
        if asked is not None and ends:
            self._executor.die(RuntimeError("worker is gone"))
        return result

    generate = found("tensorrt_llm.LLM").generate_async
    monkeypatch.setattr(found("tensorrt_llm.LLM"), "generate_async", generate_async)
    assert examined("roles", folder)["A9"] == verdict


@pytest.mark.parametrize(("verdict", "asserts"), [(CONFIRMED, True), (REFUTED, False)])
def test_handoffs(verdict: str, asserts: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not asserts:  # as newer versions, which pass first_gen_log_probs
        jobs = found("tensorrt_llm._jobs")
        entry = method("tensorrt_llm._jobs", "_entry")
        monkeypatch.setattr(jobs.Job, "_scores", lambda self, index, delta: [entry(token) for token in delta.logprobs])
    assert examined("handoff", folder)["A1"] == verdict


@pytest.mark.parametrize("trt", [NEWEST], indirect=True)
def test_main_refutes_what_it_has_mended(folder: Path) -> None:
    """The stand-in of the newest version, unchanged."""
    assert examined("handoff", folder)["A1"] == REFUTED


@pytest.mark.parametrize(
    ("verdict", "message", "healthy"), [(CONFIRMED, "CUDA error", True), (REFUTED, "CUDA error", False)]
)
def test_errors_of_the_gpu(
    verdict: str, message: str, healthy: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults().device_error = message
    monkeypatch.setattr(found("tensorrt_llm.LLM"), "_check_health", lambda self: healthy)
    assert examined("device", folder)["A4"] == verdict


def test_a_gpu_fault_that_cannot_be_provoked_gives_no_verdict(folder: Path) -> None:
    assert examined("device", folder)["A4"] == "not run"


@pytest.mark.parametrize(
    ("verdict", "workers", "notices"), [(CONFIRMED, "2", True), (REFUTED, "2", False), ("not run", "0", False)]
)
def test_killed_workers(
    verdict: str, workers: str, notices: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_WORKERS", workers)
    if not notices:
        monkeypatch.setattr(found("tensorrt_llm._executor").Executor, "_lose_worker", lambda self: None)
    assert examined("killed", folder)["A5"] == verdict


@pytest.mark.parametrize(("verdict", "lives"), [(CONFIRMED, False), (REFUTED, True)])
def test_orphans(verdict: str, lives: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        (process,) = [below for below in tree.descendants(os.getpid()) if below.pid == child.pid]
        if not lives:
            child.kill()
            child.wait()

        async def part(name: str, model: str) -> Any:
            return SimpleNamespace(stdout=json.dumps([process]).encode())

        monkeypatch.setattr(probe, "_part", part)
        assert examined("orphans", folder)["A13"] == verdict
    assert child.returncode == -9, "what is left is killed"


def test_without_a_gpu_transfers_say_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "gpus", list)
    assert examined("transfers", folder)["A12"] == "not run"


@pytest.mark.parametrize(
    ("verdict", "seconds", "status"),
    [
        (CONFIRMED, {"y": 0.001, "n": 0.01}, 0),
        (REFUTED, {"y": 0.01, "n": 0.01}, 0),
        ("not run", {"y": 0.01, "n": 0.01}, 1),
    ],
)
def test_transfers(
    verdict: str, seconds: dict[str, float], status: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def part(name: str, model: str, **variables: str) -> Any:
        return SimpleNamespace(stdout=f"{seconds[variables['UCX_CUDA_IPC_CACHE']]}".encode(), returncode=status)

    monkeypatch.setattr(probe, "_part", part)
    monkeypatch.setattr(probe, "gpus", lambda: ["one"])
    assert examined("transfers", folder)["A12"] == verdict


def test_autodeploy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examined("autodeploy", folder)["A17"] == CONFIRMED

    def fail(self: Any, **call: Any) -> None:
        raise RuntimeError("cannot be exported")

    monkeypatch.setattr(found("tensorrt_llm._torch.auto_deploy.LLM"), "generate_async", fail)
    assert examined("autodeploy", folder)["A17"] == REFUTED


@pytest.mark.parametrize(("verdict", "handles"), [(CONFIRMED, 1), (REFUTED, 2)])
def test_images(verdict: str, handles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path, vision_config={}, model_type="qwen2_vl")
    generate = found("tensorrt_llm.llmapi.MultimodalEncoder").generate_async

    class Encoded:
        """A result whose handles are as many as the case says."""

        def __init__(self, result: Any) -> None:
            self._result = result

        def __await__(self) -> Any:
            yield from self._result.__await__()
            params = self._result.disaggregated_params
            self.disaggregated_params = SimpleNamespace(
                multimodal_embedding_handles=(params.multimodal_embedding_handles * 2)[:handles],
                mrope_position_ids_handle=params.mrope_position_ids_handle,
            )

    monkeypatch.setattr(
        found("tensorrt_llm.llmapi.MultimodalEncoder"),
        "generate_async",
        lambda self, inputs: Encoded(generate(self, inputs)),
    )
    assert examined("images", tmp_path)["A11"] == verdict


def test_a_model_without_images_says_nothing_of_them(folder: Path) -> None:
    assert examined("images", folder) == {"A10": "not run", "A11": "not run"}


def test_every_fact_is_checked_once() -> None:
    checks = [check for group in probe.GROUPS.values() for check in group.checks]
    assert sorted(checks) == sorted(probe.FACTS)
    behaviours = json.loads((Path(__file__).parents[2] / "contract" / "trtllm_behaviours.json").read_text())
    checked = {check.partition(".")[0] for check in checks}
    assert checked == {f"A{number}" for number in range(1, 19)}
    known = {found[0] for behaviour in behaviours if (found := re.match(r"A\d+", behaviour["id"]))}
    assert known == checked
