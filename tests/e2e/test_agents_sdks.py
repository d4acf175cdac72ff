"""The examples of docs/agents.md, run with the SDKs that they are for, against a scripted fake engine.

An example is skipped where its SDK is missing. The folder AGENT_SDKS may have them: Python packages in `site`, those
of Node in `node_modules`, with the command `codex`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.environment import python_path
from tests.support.servers import ROOT, ServerThread

SDKS = Path(os.environ.get("AGENT_SDKS", "/nonexistent"))
EXAMPLE = re.compile(r"^```(python|js)\n(?://|#) (pip|npm) install ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
EXAMPLES = {install: (language, code) for language, _, install, code in EXAMPLE.findall(PAGE)}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "Take no umbrella to Paris."


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    """A model that calls the tool of the examples, and answers when it has the result."""
    (tmp_path / "script.json").write_text(json.dumps([CALL, ANSWER]))
    with ServerThread(fake_script=tmp_path / "script.json", served_model_name="smollm2-135m-instruct") as server:
        yield server


def test_the_page_has_an_example_for_each_sdk() -> None:
    assert len(EXAMPLES) >= 3, "the examples are not found any more"


@pytest.mark.parametrize("install", EXAMPLES)
def test_an_agent_calls_a_tool_and_answers(install: str, server: ServerThread, tmp_path: Path) -> None:
    language, code = EXAMPLES[install]
    assert "http://127.0.0.1:8000" in code and "smollm2-135m-instruct" in code
    code = code.replace("http://127.0.0.1:8000", server.url)
    environment = {**os.environ, "OPENAI_API_KEY": "unused", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}
    if language == "python":
        environment["PYTHONPATH"] = python_path(str(SDKS / "site"))
        modules = [name.replace("openai-agents", "agents").replace("-", "_") for name in install.split()]
        needed = "; ".join(f"import {module}" for module in modules)
        if subprocess.run([sys.executable, "-c", needed], env=environment, capture_output=True, check=False).returncode:
            pytest.skip(f"needs {install}")
        command = [sys.executable, "-c", code]
    else:
        if shutil.which("node") is None or not all((SDKS / "node_modules" / name).exists() for name in install.split()):
            pytest.skip(f"needs node and {install}")
        (tmp_path / "node_modules").symlink_to(SDKS / "node_modules")
        (tmp_path / "example.mjs").write_text(code)
        command = ["node", str(tmp_path / "example.mjs")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith(ANSWER), (ended.stdout, ended.stderr)


def exec_call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'exec_command', 'arguments': {'cmd': command}})}\n</tool_call>"


def test_codex_completes_a_task(tmp_path: Path) -> None:
    codex = SDKS / "node_modules" / ".bin" / "codex"
    if not codex.exists():
        pytest.skip("needs @openai/codex")
    (config,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    (tmp_path / "script.json").write_text(
        json.dumps([exec_call("echo hello > hello.txt"), exec_call("wc -l hello.txt"), ANSWER])
    )
    settings = {"fake_script": tmp_path / "script.json", "max_seq_len": 400_000, "tool_call_parser": "hermes"}
    with ServerThread(served_model_name="smollm2-135m-instruct", **settings) as server:
        (home / "config.toml").write_text(config.replace("http://127.0.0.1:8000", server.url))
        command = [str(codex), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Make hello.txt"]
        ended = subprocess.run(
            command, cwd=project, env={**os.environ, "CODEX_HOME": str(home)}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.strip().endswith(ANSWER)
    assert (project / "hello.txt").read_text() == "hello\n"
