"""Agents and SDKs against a scripted fake engine: the examples of docs/agents.md, tasks of several tool calls by Codex
and Claude Code, and the helpers of OpenAI's SDK for Node.

A test is skipped where its SDK is missing. The folder AGENT_SDKS may have them: Python packages in `site`, those of
Node (@anthropic-ai/claude-code, @openai/codex, openai and those of the examples) in `node_modules`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import python_path
from tests.support.servers import ROOT, ServerThread, serving

SDKS = Path(os.environ.get("AGENT_SDKS", "/nonexistent"))
EXAMPLE = re.compile(r"^```(python|js)\n(?://|#) (pip|npm) install ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
EXAMPLES = {install: (language, code) for language, _, install, code in EXAMPLE.findall(PAGE)}


def call(name: str, **arguments: Any) -> str:
    """A call as `hermes` writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL = call("get_weather", city="Paris")
STRICT = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that refuses what Qwen3.5's refuses."""
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
        command = node_command(install, code, tmp_path)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith(ANSWER), (ended.stdout, ended.stderr)


def node_command(install: str, code: str, folder: Path) -> list[str]:
    """Return the command that runs `code` in Node with these packages; the test is skipped where they are missing."""
    if shutil.which("node") is None or not all((SDKS / "node_modules" / name).exists() for name in install.split()):
        pytest.skip(f"needs node and {install}")
    (folder / "node_modules").symlink_to(SDKS / "node_modules")
    (folder / "example.mjs").write_text(code)
    return ["node", str(folder / "example.mjs")]


NODE = """
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused" });
const model = "smollm2-135m-instruct";
const question = "What is the weather in Paris?";
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const ran = [];

const runner = client.chat.completions.runTools({
  model,
  stream: true,
  stream_options: { include_usage: true },
  messages: [{ role: "user", content: question }],
  tools: [{ type: "function", function: {
    name: "get_weather", parameters, parse: JSON.parse,
    function: ({ city }) => { ran.push(city); return "21 degrees"; },
  } }],
});
let deltas = "";
runner.on("content", (delta) => { deltas += delta; });
const chat = { final: await runner.finalContent(), deltas, usage: await runner.totalUsage() };

const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
const calling = client.responses.stream({ model, input: question, tools });
let written = "";
calling.on("response.function_call_arguments.delta", (event) => { written += event.delta; });
const called = await calling.finalResponse();
const [{ call_id, arguments: given }] = called.output;
const output = [{ type: "function_call_output", call_id, output: "21 degrees" }];
const answering = client.responses.stream({ model, input: output, previous_response_id: called.id, tools });
let text = "";
const kinds = [];
for await (const event of answering) {
  kinds.push(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
}
const answered = await answering.finalResponse();
const items = [];
for await (const item of client.responses.inputItems.list(answered.id)) items.push(item.type);
const stored = await client.responses.retrieve(answered.id);

const parsed = await client.responses.parse({
  model, input: question,
  text: { format: { type: "json_schema", name: "n", schema: { type: "object", properties: {} } } },
});
let failed;
await client.responses.stream({ model, input: question, temperature: -1 }).done().catch((error) => { failed = error; });
console.log(JSON.stringify({
  ran, chat, written, given, text, kinds, items, final: answered.output_text, stored: stored.output_text,
  parsed: parsed.output_parsed, param: failed.param, status: failed.status,
}));
"""


def test_the_helpers_of_openais_sdk_for_node(tmp_path: Path) -> None:
    command = node_command("openai", NODE, tmp_path)
    (tmp_path / "script.json").write_text(json.dumps([CALL, ANSWER, CALL, ANSWER, '{"a": 1}']))
    settings = {"fake_script": tmp_path / "script.json", "cache_dir": tmp_path, "responses_store_mb": 64}
    with ServerThread(served_model_name="smollm2-135m-instruct", **settings) as server:
        ended = subprocess.run([*command, server.url], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ran"] == ["Paris"]
    assert (found["chat"]["final"], found["chat"]["deltas"]) == (ANSWER, ANSWER)
    assert found["chat"]["usage"]["total_tokens"] > 0
    assert json.loads(found["given"]) == json.loads(found["written"]) == {"city": "Paris"}
    assert found["text"] == found["final"] == found["stored"] == ANSWER
    assert (found["kinds"][0], found["kinds"][-1]) == ("response.created", "response.completed")
    assert found["items"] == ["function_call_output", "function_call", "message"]
    assert found["parsed"] == {"a": 1}
    assert (found["param"], found["status"]) == ("temperature", 400)


def run_agent(
    name: str, folder: Path, answers: list[str], arguments: list[str], variables: Callable[[str, Path], dict[str, str]]
) -> str:
    """Return what a coding agent prints about a task, in the folder `project`, for which its model gives these answers.
    `variables` are those of its environment, by the server's URL and its home.
    """
    installed = SDKS / "node_modules" / ".bin" / name
    command = str(installed) if installed.exists() else shutil.which(name)
    if command is None:
        pytest.skip(f"needs the command {name}")
    project, home, script = folder / "project", folder / "home", folder / "script.json"
    project.mkdir()
    home.mkdir()
    script.write_text(json.dumps(answers))
    (folder / "template.jinja").write_text(STRICT)
    flags = ("--served-model-name", "smollm2-135m-instruct", "--tool-call-parser", "hermes", "--max-seq-len", "400000")
    store = ("--cache-dir", str(folder), "--responses-store-mb", "64", "--chat-template", f"{folder}/template.jinja")
    with serving("--fake-script", str(script), *flags, *store) as server:
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables(server.url, home)}
        ended = subprocess.run(
            [command, *arguments], cwd=project, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert "ignoring the unknown request field" not in server.log
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


def test_codex_completes_a_task(tmp_path: Path) -> None:
    """With the configuration of docs/agents.md."""
    (config,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

    def variables(url: str, home: Path) -> dict[str, str]:
        (home / "config.toml").write_text(config.replace("http://127.0.0.1:8000", url))
        return {"CODEX_HOME": str(home)}

    answers = [
        "I write the file.\n" + call("exec_command", cmd="echo hello > hello.txt && cat hello.txt"),
        call("exec_command", cmd="sed -i s/hello/trellis/ hello.txt"),
        call("exec_command", cmd="wc -c hello.txt"),
        "The file has eight bytes.",
    ]
    arguments = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Make hello.txt, count its bytes"]
    assert run_agent("codex", tmp_path, answers, arguments, variables).endswith(answers[-1])
    assert (tmp_path / "project" / "hello.txt").read_text() == "trellis\n"


def test_claude_code_completes_a_task(tmp_path: Path) -> None:
    file = tmp_path / "project" / "hello.txt"

    def variables(url: str, _: Path) -> dict[str, str]:
        model = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "smollm2-135m-instruct")
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "unused", **model, **quiet}

    answers = [
        "I write the file.\n" + call("Write", file_path=str(file), content="hello\nworld\n"),
        call("Read", file_path=str(file)),
        call("Edit", file_path=str(file), old_string="world", new_string="trellis"),
        call("Bash", command="wc -l hello.txt", description="Count lines"),
        "The file has two lines.",
    ]
    arguments = ["-p", "Make hello.txt and count its lines", "--output-format", "json"]
    arguments += ["--allowedTools", "Write", "Read", "Edit", "Bash"]
    result = json.loads(run_agent("claude", tmp_path, answers, arguments, variables))
    assert (result["is_error"], result["num_turns"], result["result"]) == (False, 5, answers[-1])
    assert file.read_text() == "hello\ntrellis\n"
    used = result["usage"]
    assert used["cache_read_input_tokens"] > 3 * used["input_tokens"], "prompts are reused from turn to turn"
