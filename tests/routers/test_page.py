"""The pages at / and /docs: access, caching, and the integrity of their files."""

import base64
import gzip
import hashlib
import json
import re
from typing import Any

import pytest

from routers.page import FOLDER
from server.settings import Settings
from tests.support.servers import application
from tests.test_docs import ROOT

VENDORED: list[dict[str, str]] = json.loads((FOLDER / "vendor/integrity.json").read_text())
OURS = sorted(path for folder in ("page", "docs") for path in (FOLDER / folder).iterdir())


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, True),
        ({"host": "127.0.0.2"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "192.168.0.1"}, False),
        ({"host": "example.com"}, False),
        ({"host": "0.0.0.0", "page": True}, True),
        ({"page": False}, False),
        ({"page": ""}, True),
        ({"modality": "visual"}, True),
        ({"disaggregation_mode": "prefill", "internal_secret": "secret"}, False),
        ({"disaggregation_mode": "router", "route_urls": ("http://127.0.0.1:1",)}, True),
    ],
    ids=str,
)
async def test_the_page_is_there_on_local_addresses(settings: dict[str, Any], shown: bool) -> None:
    async with application(wait=False, docs=False, **settings) as (client, _):
        page = await client.get("/")
        assert page.status_code == (200 if shown else 404)
        assert ("<title>Trellis</title>" in page.text) == shown
        for path in ("/static/page/app.js", "/openapi.json"):
            assert (await client.get(path)).status_code == page.status_code
        assert (await client.get("/docs")).status_code == 404


@pytest.mark.parametrize(
    "header",
    [
        "forwarded",
        "x-forwarded-for",
        "X-Forwarded-Server",
        "X-Forwarded-Prefix",
        "X-Real-IP",
        "Via",
        "CF-Connecting-IP",
        "True-Client-IP",
    ],
)
async def test_the_page_is_not_there_through_proxies_unless_it_is_set(header: str) -> None:
    """nginx on the same machine would show it to the world."""
    for page, status in ((None, 404), (True, 200)):
        async with application(wait=False, page=page) as (client, _):
            answer = await client.get("/", headers={header: "192.0.2.1"})
            assert answer.status_code == status
            assert page or "PAGE=true" in answer.json()["error"]["message"]
            assert (await client.get("/docs", headers={header: "192.0.2.1"})).status_code == 200


async def test_files_are_sent_compressed_and_once() -> None:
    async with application(wait=False) as (client, _):
        for path, kind in (
            ("/", "text/html"),
            ("/docs", "text/html"),
            ("/static/page/page.css", "text/css"),
            ("/static/page/app.js", "text/javascript"),
            ("/static/vendor/preact.mjs", "text/javascript"),
        ):
            plain = await client.get(path, headers={"accept-encoding": "identity"})
            assert plain.headers["content-type"] == f"{kind}; charset=utf-8"
            assert plain.headers["cache-control"] == "no-cache"
            assert plain.headers["x-content-type-options"] == "nosniff"
            assert "content-encoding" not in plain.headers
            async with client.stream("GET", path, headers={"accept-encoding": "br, gzip;q=0.8"}) as packed:
                assert gzip.decompress(b"".join([part async for part in packed.aiter_raw()])) == plain.content
                assert packed.headers["vary"] == "Accept-Encoding"
                assert packed.headers["etag"] == plain.headers["etag"]
            for refused in ("gzip;q=0", "br, gzip ; Q=0.000"):
                answer = await client.get(path, headers={"accept-encoding": refused})
                assert "content-encoding" not in answer.headers and answer.content == plain.content
            known = {"if-none-match": f'"other", {plain.headers["etag"]}'}
            again = await client.get(path, headers=known)
            assert again.status_code == 304 and not again.content
            assert again.headers["etag"] == plain.headers["etag"]
            head = await client.head(path, headers={"accept-encoding": "identity"})
            assert head.status_code == 200 and head.headers["content-length"] == plain.headers["content-length"]
            assert (await client.get(path, headers={"if-none-match": '"other"'})).status_code == 200


async def test_only_files_of_the_pages_are_sent() -> None:
    async with application() as (client, _):
        for name in (
            "nothing.js",
            "index.html",
            "../page.py",
            "%2e%2e/page.py",
            "/etc/passwd",
            "vendor/LICENSES.txt",
            "",
        ):
            answer = await client.get(f"/static/{name}")
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"


async def test_policies_forbid_other_servers_and_inline_scripts() -> None:
    async with application(wait=False) as (client, _):
        for path in ("/", "/docs"):
            answer = await client.get(path)
            policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == "'self'"
            assert "unsafe" not in policy["style-src"] or path == "/docs"
            assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|https?://", answer.text)


async def test_openapi_does_not_describe_the_pages() -> None:
    async with application() as (client, _):
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert not {"/", "/docs", "/openapi.json"} & paths.keys() and not any("static" in path for path in paths)


@pytest.mark.parametrize("entry", VENDORED, ids=lambda entry: entry["file"])
def test_vendored_scripts_are_what_their_authors_published(entry: dict[str, str]) -> None:
    """To the byte: `integrity.json` has the hashes of the files in the packages."""
    assert integrity(entry["file"]) == entry["integrity"]
    assert f"==== {entry['package']} {entry['version']} ====" in (FOLDER / "vendor/LICENSES.txt").read_text()


def test_every_vendored_script_is_listed_and_checked_by_browsers() -> None:
    files = {path.name for path in (FOLDER / "vendor").iterdir()} - {"integrity.json", "LICENSES.txt"}
    assert files == {entry["file"] for entry in VENDORED}
    html = "".join((FOLDER / name).read_text() for name in ("index.html", "docs.html"))
    checked = dict(re.findall(r'(?:href|src)="static/vendor/([^"]+)" integrity="([^"]+)"', html))
    assert checked == {entry["file"]: entry["integrity"] for entry in VENDORED}


def integrity(name: str) -> str:
    digest = hashlib.sha384((FOLDER / "vendor" / name).read_bytes()).digest()
    return f"sha384-{base64.b64encode(digest).decode()}"


def test_imports_of_scripts_are_there() -> None:
    scripts = [path for path in OURS if path.suffix == ".js"]
    assert len(scripts) > 10
    for path in scripts:
        for imported in re.findall(r'from "([^"]+)"', path.read_text()):
            assert imported.startswith("."), "no build step resolves names"
            assert (path.parent / imported).resolve().is_file(), (path.name, imported)


def test_the_page_asks_for_metrics_that_exist() -> None:
    script = (FOLDER / "page/live.js").read_text()
    names = re.findall(r'^  \w+: "((?:trtllm|trellis)_\w+)",$', script, re.MULTILINE)
    assert len(names) > 5
    described = "".join((ROOT / "docs" / name).read_text() for name in ("observability.md", "routing.md"))
    assert [name for name in names if f"`{name}`" not in described] == []


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ValueError, match="page"):
        Settings(page="perhaps")


async def test_the_page_opens_while_the_model_loads() -> None:
    async with application(wait=False) as (client, state):
        state["replica"].service = None
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 503


async def test_polled_routes_are_not_logged_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.app.on_terminal", lambda _: True)
    for setting, lines in ((None, 1), (True, 3), (False, 0)):
        caplog.clear()
        with caplog.at_level("INFO", logger="access"):
            async with application(access_log=setting) as (client, _):
                for path in ("/metrics", "/health/ready", "/v1/models"):
                    assert (await client.get(path)).status_code == 200
        assert len(caplog.records) == lines
