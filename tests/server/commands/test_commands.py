"""The commands other than `serve`, against a running server."""

import io
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from server.cli import main
from server.commands import bench
from server.commands.chat import Chat, data_url, images_in
from server.commands.models import models
from server.commands.remote import Remote, RemoteError, named_server
from tests.support.environment import bare
from tests.support.servers import ServerThread

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "smolvision/example.png"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with ServerThread(api_keys="secret") as running:
        yield running


@pytest.fixture
def chat(server: ServerThread) -> Chat:
    return Chat(Remote(server.url, "secret"), "fake", "Be brief.", {"max_tokens": 400}, write=lambda text: None)


def test_a_chat_remembers_its_messages(chat: Chat) -> None:
    written: list[str] = []
    chat.write = written.append
    chat.say("hello")
    assert chat.messages[:2] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    answer = chat.messages[2]["content"]
    assert "hello" in answer and "".join(written) == f"{answer}\n"
    assert len(written) > 5, "it is written as it comes"
    chat.say("more")
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 2]
    chat.again()
    assert [message["content"] for message in chat.messages[1::2]] == ["hello", "more"] and len(chat.messages) == 5
    chat.restart("Other.")
    assert chat.messages == [{"role": "system", "content": "Other."}]
    with pytest.raises(RemoteError, match="there is no answer yet"):
        chat.again()


def test_an_answer_can_be_stopped(chat: Chat) -> None:
    def stop(text: str) -> None:
        if text.strip() and not text.startswith(" (stopped)"):
            raise KeyboardInterrupt

    chat.write = stop
    chat.say("hello")
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"], "what came stays"


def test_an_error_of_the_server_is_shown_and_leaves_no_trace(server: ServerThread) -> None:
    chat = Chat(Remote(server.url, "secret"), "fake", "", {"temperature": -1}, write=lambda text: None)
    with pytest.raises(RemoteError, match=r"HTTP 400: .*temperature"):
        chat.say("hello")
    assert chat.messages == []


def test_images_are_named_by_path(tmp_path: Path, chat: Chat) -> None:
    spaced = tmp_path / "my picture.PNG"
    spaced.write_bytes(EXAMPLE.read_bytes())
    assert images_in(f"what is in {EXAMPLE}, and why") == (f"what is in {EXAMPLE}, and why", []), "a comma follows"
    assert images_in(f"what is in {EXAMPLE} ?") == ("what is in  ?", [str(EXAMPLE)])
    assert images_in(f"'{spaced}' describe") == ("describe", [str(spaced)])
    assert images_in(f"{str(spaced).replace(' ', chr(92) + ' ')} describe") == ("describe", [str(spaced)])
    assert images_in("it's a.png that is missing") == ("it's a.png that is missing", [])
    assert data_url(EXAMPLE).startswith("data:image/png;base64,iVBOR")
    with pytest.raises(RemoteError, match=r"none\.png cannot be read: No such file"):
        chat.say("", ["/none.png"])


def run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "trellis.py"), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, env=bare(), cwd="/", timeout=60)


def test_a_message_of_the_command_line_and_a_pipe(server: ServerThread) -> None:
    done = run("chat", "--url", server.url, "--api-key", "secret", "--max-tokens", "100", "echo", "this", text="piped")
    assert (done.returncode, done.stderr) == (0, "")
    assert "echo this\n\npiped" in done.stdout


def test_images_of_a_message_are_sent(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, Sequence[str]]] = []
    monkeypatch.setattr(Chat, "say", lambda self, text, images=(): said.append((text, images)))
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    flags = ["chat", "--url", server.url, "--api-key", "secret", "--image", "other.png"]
    assert main([*flags, "describe", str(EXAMPLE)]) == 0
    assert said == [("describe\n\npiped", ["other.png", str(EXAMPLE)])]


def test_no_server_and_no_key_are_explained(server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1 (" in (error := capsys.readouterr().err)
    assert "trellis serve" in error and error.count("\n") == 1
    assert main(["bench", "--url", server.url, "--api-key", "wrong"]) == 1
    assert capsys.readouterr().err.startswith("error: HTTP 401: ")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ([], "mine"), (["--url", "http://gpu.lan:8000/v1"], "mine"), (["--url", "127.0.0.1:9"], "mine"),
        (["--url", "http://localhost:9"], "mine"), (["--url", "http://[::1]:9"], "mine"),
        (["--url", "http://gpu.lan:9"], ""), (["--url", "https://127.0.0.1.example.com"], ""),
        (["--url", "https://example.com", "--api-key", "theirs"], "theirs"), (["--api-key", ""], ""),
    ],
)  # fmt: skip
def test_our_key_is_for_our_server(flags: list[str], key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEYS", "mine,other")
    monkeypatch.setenv("HOST", "gpu.lan")
    monkeypatch.setenv("PORT", "8000")
    assert named_server(bench.parser().parse(flags)).key == key


def test_bench_shows_what_clients_see(server: ServerThread, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", f"{server.url}/v1", "--api-key", "secret", "-c", "2", "--max_tokens", "4"]
    assert main(["bench", *flags]) == 0
    out = capsys.readouterr().out
    assert "8 requests of 40 + 4 tokens, 2 at a time" in out and "time to first text" in out and "errors" not in out
    assert main(["bench", *flags, "-n", "3", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["completion_tokens"], summary["errors"]) == (3, 12, 0)


def test_models_are_listed_with_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    snapshot = hub / "models--owner--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (hub / "models--owner--name" / "blobs").mkdir()
    (hub / "models--owner--name" / "blobs" / "1").write_bytes(bytes(1000))
    (hub / "models--half--downloaded").mkdir()
    monkeypatch.setattr("server.commands.models.hub_folder", lambda: hub)
    found = {row.name: row for row in models(tmp_path)}
    assert found["smollm2-135m-instruct"].size > 10**7
    assert found["smollm2-135m-instruct"].where == "installed, converted at the first start (default)"
    assert found["owner/name"].size == 1000 and "half/downloaded" not in found


def test_the_extra_for_a_cpu_names_torchs_cpu_build() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_cpu, of_any = ({r for r in extras[name] if not r.startswith("torch")} for name in ("cpu", "embedded"))
    assert of_cpu == of_any
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert f"{pinned}+cpu; sys_platform == 'linux'" in extras["cpu"]
