"""Claude Code completes a task of several tool calls against a scripted model.

It is skipped without the command `claude`: `npm install @anthropic-ai/claude-code`, and `node_modules/.bin` in PATH.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import serving

CLAUDE = shutil.which("claude")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.skipif(CLAUDE is None, reason="Claude Code is not installed")
def test_a_task_of_several_calls(tmp_path: Path) -> None:
    project, home, script = tmp_path / "project", tmp_path / "home", tmp_path / "script.json"
    project.mkdir()
    home.mkdir()
    file = project / "hello.txt"
    answers = [
        "I write the file.\n" + call("Write", file_path=str(file), content="hello\nworld\n"),
        call("Read", file_path=str(file)),
        call("Edit", file_path=str(file), old_string="world", new_string="trellis"),
        call("Bash", command="wc -l hello.txt", description="Count lines"),
        "The file has two lines.",
    ]
    script.write_text(json.dumps(answers))
    names = ("--served-model-name", "trellis", "--tool-call-parser", "hermes", "--max-seq-len", "400000")
    with serving("--fake-script", str(script), *names) as server:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": "trellis",
            "ANTHROPIC_SMALL_FAST_MODEL": "trellis",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        command = [str(CLAUDE), "-p", "Make hello.txt and count its lines", "--output-format", "json"]
        command += ["--allowedTools", "Write", "Read", "Edit", "Bash"]
        ran = subprocess.run(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        result = json.loads(ran.stdout)
        assert (result["is_error"], result["num_turns"], result["result"]) == (False, 5, answers[-1])
        assert file.read_text() == "hello\ntrellis\n"
        used = result["usage"]
        assert used["cache_read_input_tokens"] > 3 * used["input_tokens"], "prompts are reused from turn to turn"
        assert "ignoring the unknown request field" not in server.log
