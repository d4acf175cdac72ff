"""Codex completes a task of several tool calls against a scripted model.

It is skipped without the command `codex`: `npm install @openai/codex`, and `node_modules/.bin` in PATH.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import serving

CODEX = shutil.which("codex")
CONFIG = """
model = "trellis"
model_provider = "trellis"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.trellis]
name = "Trellis"
base_url = "{url}/v1"
wire_api = "responses"
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.skipif(CODEX is None, reason="Codex is not installed")
def test_a_task_of_several_calls(tmp_path: Path) -> None:
    project, home, script = tmp_path / "project", tmp_path / "home", tmp_path / "script.json"
    project.mkdir()
    home.mkdir()
    answers = [
        "I write the file.\n" + call("exec_command", cmd="echo hello > hello.txt && cat hello.txt"),
        call("exec_command", cmd="sed -i s/hello/trellis/ hello.txt"),
        call("exec_command", cmd="wc -c hello.txt"),
        "The file has eight bytes.",
    ]
    script.write_text(json.dumps(answers))
    names = ("--served-model-name", "trellis", "--tool-call-parser", "hermes", "--max-seq-len", "400000")
    store = ("--cache-dir", str(tmp_path), "--responses-store-mb", "64")
    with serving("--fake-script", str(script), *names, *store) as server:
        (home / "config.toml").write_text(CONFIG.format(url=server.url))
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)}
        command = [str(CODEX), "exec", "--skip-git-repo-check", "Make hello.txt and count its bytes"]
        ran = subprocess.run(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert answers[-1] in ran.stdout
        assert (project / "hello.txt").read_text() == "trellis\n"
        assert "ignoring the unknown request field" not in server.log
