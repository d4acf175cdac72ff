"""The page at `/`, the page at `/docs`, and the scripts and styles of both, which lie in `static/`.

They need no API key, since a browser sends none when it opens a page: the page asks for one and sends it with its
requests. Content security policies confine them to this server.
"""

import asyncio
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

FOLDER = Path(__file__).parent / "static"
STATIC = "/static/"
CHAT, DOCS = "/", "/docs"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'{styles}; img-src 'self' data: blob:; "
    "media-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_POLICIES = {
    "index.html": _POLICY.format(styles="") + "; require-trusted-types-for 'script'; trusted-types dompurify",
    "docs.html": _POLICY.format(styles=" 'unsafe-inline'"),  # Swagger UI has style attributes
}
_FORWARDED = re.compile("x-forwarded-.*|forwarded|via|x-real-ip|cf-connecting-ip|true-client-ip")
"""Names of headers that proxies add."""
_REFUSED = re.compile(r"\s*q\s*=\s*0(\.0*)?\s*", re.IGNORECASE)
"""The weight of an encoding that a client does not take."""


def page_router(chat: bool, docs: bool, direct_only: bool) -> APIRouter:
    """Return the routes of the pages that are shown, with their files. With `direct_only` the page at `/` is not shown
    to requests with headers that proxies add.
    """
    router = APIRouter(include_in_schema=False)
    files = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.glob("*/*") if path.suffix in _TYPES}

    async def show_chat(request: Request) -> Response:
        if direct_only and any(map(_FORWARDED.fullmatch, request.headers.keys())):
            raise HTTPException(HTTPStatus.NOT_FOUND, "The page is not served through proxies unless PAGE=true.")
        return await _answer(request, FOLDER / "index.html")

    async def show_docs(request: Request) -> Response:
        return await _answer(request, FOLDER / "docs.html")

    async def static(request: Request, name: str) -> Response:
        if (path := files.get(name)) is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return await _answer(request, path)

    if chat:
        router.add_api_route(CHAT, show_chat)
    if docs:
        router.add_api_route(DOCS, show_docs)
    if chat or docs:
        router.add_api_route(STATIC + "{name:path}", static)
    return router


@dataclass(frozen=True)
class _File:
    """A file as it is sent."""

    body: bytes
    compressed: bytes
    headers: dict[str, str]


async def _answer(request: Request, path: Path) -> Response:
    """Return a file, or 304 if the client has it."""
    file = await asyncio.to_thread(_read, path)
    if file.headers["ETag"] in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=file.headers)
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(file.compressed, headers={**file.headers, "Content-Encoding": "gzip"})
    return Response(file.body, headers=file.headers)


def _takes_gzip(accepted: str) -> bool:
    encodings = (part.partition(";") for part in accepted.split(","))
    return any(name.strip().lower() == "gzip" and not _REFUSED.fullmatch(weight) for name, _, weight in encodings)


@cache
def _read(path: Path) -> _File:
    body = path.read_bytes()
    headers = {
        "Content-Type": _TYPES[path.suffix],
        "ETag": f'W/"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Cache-Control": "no-cache",  # browsers keep files and ask whether they have changed
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if policy := _POLICIES.get(path.name):
        headers["Content-Security-Policy"] = policy
    return _File(body, gzip.compress(body, 6, mtime=0), headers)
