"""The compliance suite of Open Responses, over HTTP and WebSockets, against a real model and a scripted one.

It runs where the folder OPEN_RESPONSES has it, in `openresponses`, and bun and zod in `node_modules`; docs/responses.md
says how to get them.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ServerThread, serving

FOLDER = Path(os.environ.get("OPEN_RESPONSES", "/nonexistent"))
BUN = FOLDER / "node_modules" / ".bin" / "bun"
NEEDS_SKILL = "tool-calling"
"""The one test that a model of this size fails: it has to decide by itself to call a tool."""

if not BUN.exists():
    pytest.skip("needs OPEN_RESPONSES, a folder with the compliance suite", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)


def failures(url: str, model: str) -> tuple[dict[str, Any], int]:
    """Return what is wrong, by test, and how many tests have passed."""
    flags = ["--base-url", f"{url}/v1", "--api-key", "unused", "--model", model, "--json"]
    command = [str(BUN), "run", "bin/compliance-test.ts", *flags]
    ended = subprocess.run(
        command, cwd=FOLDER / "openresponses", capture_output=True, text=True, timeout=240, check=False
    )
    try:
        found = json.loads(ended.stdout)
    except ValueError:
        raise AssertionError(ended.stdout + ended.stderr) from None
    wrong = {each["id"]: each["errors"] for each in found["results"] if each["status"] != "passed"}
    assert len(found["results"]) >= 17, "the tests are not found"
    return wrong, found["summary"]["passed"]


def test_a_model_that_sees_complies(smollm2: object, tmp_path: Path) -> None:
    memory = ("--kv-cache-memory-mb", "200", "--cache-dir", str(tmp_path), "--responses-store-mb", "64")
    flags = ("--engine", "embedded", "--model", "smolvision", "--threads", "1", "--model-optional", "false")
    with serving(*flags, *memory) as server:
        wrong, passed = failures(server.url, "smolvision")
    wrong.pop(NEEDS_SKILL, None)
    assert not wrong and passed >= 16


def test_a_model_that_calls_tools_complies(tmp_path: Path) -> None:
    call = {"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}
    script = tmp_path / "script.json"
    script.write_text(json.dumps([f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "It is sunny."]))
    settings = {"fake_script": script, "tool_call_parser": "hermes", "model_optional": False}
    with ServerThread(**settings, cache_dir=tmp_path, responses_store_mb=64) as server:
        wrong, _ = failures(server.url, "fake")
    assert not wrong
