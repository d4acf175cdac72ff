"""The probe as a user runs it: groups in processes of their own, of which one may die or hang, and the report."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.trtllm import probe
from server import cli
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import python_path
from tests.support.trtllm import ROOT, model_folder
from tests.support.waiting import slowness


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_TRTLLM, ROOT.parent))
    # Without images, for which the stand-in imports torch: a second for each process.
    return str(model_folder(tmp_path, vocab_size=512, image_token_id=None))


def test_the_report(model: str, tmp_path: Path) -> None:
    assert probe.run(model, tmp_path, names=("handoff", "roles", "images")) in (0, 1)
    report: dict[str, Any] = json.loads((tmp_path / f"{probe.REPORT}.json").read_text())
    found = {outcome["id"]: outcome for outcome in report["outcomes"]}
    assert found.keys() == {"A1", "A9", "A10", "A11"}
    assert found["A1"]["verdict"] == "confirmed" and "AssertionError" in found["A1"]["evidence"]
    assert found["A10"]["verdict"] == "not run"
    text = (tmp_path / f"{probe.REPORT}.md").read_text()
    assert all(f"| {check} | {probe.FACTS[check]} | {found[check]['verdict']} |" in text for check in found)
    assert report["versions"]["python"] in text


def test_a_group_that_dies_or_hangs_stops_no_other(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRTLLM_FAULTS", json.dumps({"construction_error": "no memory"}))
    (died,) = probe.outcomes_of(model, 60.0, ["roles"])
    assert died.verdict == "not run" and "status 1" in died.evidence and "no memory" in died.evidence
    monkeypatch.setenv("FAKE_TRTLLM_FAULTS", json.dumps({"construction_seconds": 3600}))
    started = time.monotonic()
    first, second = probe.outcomes_of(model, 3.0, ["roles", "handoff"])
    assert time.monotonic() - started < 20 * slowness()
    assert first.verdict == second.verdict == "not run"
    assert "stopped after 3 s" in first.evidence and "no time left" in second.evidence


def test_no_process_of_a_group_is_left(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not even a process in a session of its own."""
    pid = tmp_path / "pid"
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{code}")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert next(probe.outcomes_of(model, 3.0 * slowness(), ["roles"])).verdict == "not run"
    command = Path("/proc", pid.read_text(), "cmdline")
    while command.exists() and command.read_bytes():  # empty once it is dead, though nobody may have waited for it
        time.sleep(0.01)


def test_the_doctor_runs_it(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """After its own checks, and only if they found no problem; here there is no GPU."""
    assert cli.main(["doctor", "--probe"]) == 2
    assert "needs --engine trtllm" in capsys.readouterr().err
    ran: list[str] = []
    monkeypatch.setattr(probe, "run", lambda name, folder: ran.append(name) or 0)
    monkeypatch.setattr("server.doctor.findings", lambda settings: iter(()))
    assert cli.main(["doctor", "--engine", "trtllm", "--model", model, "--probe"]) == 0
    assert ran == [model] and probe.REPORT in capsys.readouterr().out
    assert cli.main(["doctor", "--engine", "trtllm", "--model", model]) == 0 and len(ran) == 1
    monkeypatch.undo()
    assert cli.main(["doctor", "--engine", "trtllm", "--model", model, "--probe"]) == 1, "tensorrt_llm is not installed"


def test_the_probe_starts_as_a_module(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.trtllm.probe", "roles", model], capture_output=True, text=True, check=True
    )
    assert [json.loads(line).keys() for line in done.stdout.splitlines()] == [
        {"begun": ""}.keys(),
        {"check": "", "verdict": "", "evidence": ""}.keys(),
    ]


def test_its_processors_can_be_unpickled_elsewhere(model: str) -> None:
    """Workers do not know what was `__main__` in the group's process."""
    code = (
        "import pickle, runpy, sys\n"
        "from tensorrt_llm import LLM\n"
        "generate = LLM.generate_async\n"
        "def noting(self, **call):\n"
        "    processor = call['sampling_params'].logits_processor\n"
        "    if processor is not None:\n"
        "        sys.stderr.write(type(processor).__module__)\n"
        "    return generate(self, **call)\n"
        "LLM.generate_async = noting\n"
        f"sys.argv = ['probe', 'device', {model!r}]\n"
        "runpy.run_module('engine.trtllm.probe', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("engine.trtllm.probe"), done.stderr
