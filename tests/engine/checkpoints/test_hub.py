"""Downloads from a hub on this machine: bytes of an earlier attempt are not fetched again."""

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from engine.checkpoints.conversions import ModelError
from engine.checkpoints.hub import config_folder
from engine.checkpoints.store import present_model, resolve_model

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(range(256)) * 1000}
COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Serves one model as the hub does, and notes which ranges of its weights are asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in FILES.items()]
            content = json.dumps(tree).encode()
        elif self.path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in FILES]
            content = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
        else:
            content = FILES.get(name, b"")  # it is asked for more than files
        asked = self.headers.get("Range")
        first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if name.endswith(".safetensors") and self.command == "GET":
            self.server.ranges.append(asked)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[first:])


@pytest.mark.usefixtures("hub")
def test_a_model_of_gguf_files_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FILES, "model.safetensors")
    monkeypatch.setitem(FILES, "model-Q8_0.gguf", b"GGUF")
    with pytest.raises(ModelError, match=r"GGUF files alone: fetch one, .* hf download owner/name model-Q8_0\.gguf"):
        resolve_model("owner/name", tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants  # noqa: PLC0415 - slow to import

    server = Hub()
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_goes_on_where_it_was_interrupted(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    weights = FILES["model.safetensors"]
    blobs = tmp_path / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{hashlib.sha256(weights).hexdigest()}.trellis"
    part.write_bytes(b"other bytes" * 1000)
    with pytest.raises(
        ModelError, match=r"owner/name/model\.safetensors of the Hugging Face hub was damaged on the way"
    ):
        resolve_model("owner/name", tmp_path)
    assert not part.exists() and present_model("owner/name", tmp_path) is None
    part.write_bytes(weights[:100_000])
    with caplog.at_level("INFO"):
        folder = resolve_model("owner/name", tmp_path)
    assert "going on with owner/name/model.safetensors at byte 100000 of 256000" in caplog.text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert hub.ranges == ["bytes=11000-", "bytes=100000-"] and not part.exists()
    assert resolve_model("owner/name", tmp_path) == present_model("owner/name", tmp_path) == folder
    assert len(hub.ranges) == 2


def test_the_configuration_alone_is_no_whole_model(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config_folder("owner/name")
    assert folder is not None and [path.name for path in folder.iterdir()] == ["config.json"]
    assert present_model("owner/name", tmp_path) is None and hub.ranges == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert config_folder("owner/other") is None, "the download says why"
