"""Pictures that smolvision knows, chats about them, a server of pictures that counts, and replicas that answer."""

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import httpx
import psutil
from PIL import Image, ImageFont

from smolvision.images import Item, Scene, Writing, render
from tests.e2e.test_disaggregated import folded
from tests.support.disaggregated import SECRET
from tests.support.servers import ServerProcess

IMAGE_TOKENS = 64


def shape(colour: str, form: str, background: str = "white", seed: int = 0) -> bytes:
    """A PNG of one shape; `seed` varies its tints and noise."""
    return _png(Scene(background, (Item(colour, form, 128, 128, 100, 0, 4),)), seed)


def number(content: int, seed: int = 0) -> bytes:
    left, top, right, bottom = ImageFont.load_default(100).getbbox(str(content), anchor="mm")
    return _png(Scene("white", writing=Writing(str(content), "black", 128, 128, 100, right - left, bottom - top)), seed)


def _png(scene: Scene, seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(render(scene, Random(seed))).save(buffer, "PNG")
    return buffer.getvalue()


def message(text: str, *images: bytes | str, **fields: Any) -> dict[str, Any]:
    """A user's, with the images (files or URLs) before the text; `fields` are those of each image."""
    urls = [
        image if isinstance(image, str) else "data:image/png;base64," + base64.b64encode(image).decode()
        for image in images
    ]
    parts = [{"type": "image_url", "image_url": {"url": url, **fields}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def post(server: ServerProcess, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 2, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, verify=False)


def ask(server: ServerProcess, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The whole answer: of each choice text, finish reason and log-probabilities, and the usage."""
    answer = post(server, *messages, **fields)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return folded([answer.json()])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return folded([json.loads(event) for event in events])


def said(answer: dict[str, Any], choice: int = 0) -> str:
    text: str = answer["choices"][choice]["text"]
    return text


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def memory(server: ServerProcess) -> int:
    """Bytes of the server and its children."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    return sum(int(process.memory_info().rss) for process in processes)


class PictureServer:
    """Serves files by path, each after a moment, and counts who asks for them."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.url = ""

    def add(self, path: str, data: bytes) -> str:
        self.files[path] = data
        return self.url + path


@contextmanager
def picture_server(seconds: float = 0.3) -> Iterator[PictureServer]:
    pictures = PictureServer()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                pictures.requests[self.path] += 1
            time.sleep(seconds)
            data = pictures.files[self.path]
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pictures.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield pictures
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class Replicas:
    """One server that does all, and what does the same in two and in three kinds of replicas."""

    def __init__(
        self,
        whole: ServerProcess,
        encode: ServerProcess,
        prefill: ServerProcess,
        pair: ServerProcess,
        three: ServerProcess,
    ) -> None:
        self.whole, self.encode, self.prefill = whole, encode, prefill
        self.pair = pair
        """Decodes; images are encoded where prompts are computed."""
        self.three = three
        """Decodes; images are encoded by the encode replica."""
        self.fronts = (whole, pair, three)

    def each(self, *messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        """What each front answers, asked at the same time."""
        with ThreadPoolExecutor(len(self.fronts)) as threads:
            return list(threads.map(lambda front: ask(front, *messages, **fields), self.fronts))

    def encoded(self) -> float:
        return self.encode.metric("trtllm_encoded_images_total")


@contextmanager
def replicas(common: Sequence[str]) -> Iterator[Replicas]:
    """All started; those that still run are ended afterwards."""
    started: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        started.append(ServerProcess(*common, "--internal-secret", SECRET, *flags))
        return started[-1]

    try:
        whole, encode, prefill = (
            start(*role)
            for role in (
                (),
                ("--disaggregation-mode", "encode", "--embedding-transfer", "direct", "--encode-inline-kb", "0"),
                ("--disaggregation-mode", "prefill"),
            )
        )
        for server in (encode, prefill):
            server.wait_ready(200)
        decode = ("--disaggregation-mode", "decode", "--prefill-urls", prefill.url, "--prefill-min-tokens", "0")
        decode = (*decode, "--encode-fallback", "refuse")
        pair = start(*decode, "--encode-urls", prefill.url)
        three = start(*decode, "--encode-urls", encode.url, "--embedding-transfer", "direct")
        for server in (whole, pair, three):
            server.wait_ready(200)
        yield Replicas(whole, encode, prefill, pair, three)
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.terminate()
        for server in started:
            server.wait(20)
