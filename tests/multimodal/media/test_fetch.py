"""Fetching over HTTP: dialled addresses and followed redirects, with real connections and invented names."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from multimodal.errors import MediaError
from multimodal.media.limits import MediaLimits
from multimodal.media.loader import MediaLoader
from tests.support.media import PUBLIC, PUBLIC_V6, OddServer, image_file, moved, ok, world

PNG = image_file()


async def test_the_checked_address_is_dialled_and_the_host_named() -> None:
    async with world() as w:
        w.server.answers["/a.png?sig=%2f"] = ok(PNG, "Content-Type: text/html", "Set-Cookie: a=b")
        for _ in range(2):
            assert (await w.loader.load("http://images.test:8080/a.png?sig=%2f#x")).data == PNG
        assert (w.asked, w.transport.dialled) == (["images.test"] * 2, [PUBLIC] * 2)
        for head in w.server.heads:
            lines = head.lower().splitlines()
            assert "host: images.test:8080" in lines and "accept-encoding: identity" in lines
            assert "cookie" not in head.lower() and "authorization" not in head.lower() and "127.0.0.1" not in head


async def test_the_next_address_is_dialled_when_one_is_dead() -> None:
    async with world() as w:
        w.server.answers["/"] = ok(PNG)
        w.transport.dead.add(PUBLIC_V6)
        assert (await w.loader.load("http://both.test/")).data == PNG
        assert w.transport.dialled == [PUBLIC_V6, PUBLIC]
        w.transport.dead.add(PUBLIC)
        with pytest.raises(MediaError, match="cannot be reached"):
            await w.loader.load("http://both.test/")


async def test_names_are_resolved_once_for_each_hop() -> None:
    """A name that changes between the check and the connection, as rebinding has it, changes nothing."""
    async with world() as w:
        w.server.answers["/"] = ok(PNG)

        async def rebind(host: str, port: int) -> list[str]:
            w.asked.append(host)
            return [PUBLIC] if len(w.asked) == 1 else ["127.0.0.1"]

        w.loader._fetcher._resolve = rebind
        assert (await w.loader.load("http://images.test/")).data == PNG
        assert (w.asked, w.transport.dialled) == (["images.test"], [PUBLIC])
        with pytest.raises(MediaError, match="may fetch from"):
            await w.loader.load("http://images.test/")
        w.server.answers["/"], w.asked[:] = moved("/again"), []
        with pytest.raises(MediaError, match="may fetch from"):
            await w.loader.load("http://images.test/")
        assert w.transport.dialled == [PUBLIC] * 2 and w.server.requests["/again"] == 0


FORBIDDEN = [
    "internal.test", "mixed.test", "metadata.test", "odd.test", "nothing.test", "unknown.test", "127.0.0.1",
    "10.1.2.3", "169.254.169.254",
    "192.168.0.1", "100.100.100.200", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]",
    "[fd00:ec2::254]",
    "[fe80::1]",    "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[ff02::1]", "168.63.129.16",
    "224.0.0.1", "255.255.255.255",
]  # fmt: skip


@pytest.mark.parametrize("host", FORBIDDEN)
async def test_forbidden_hosts_are_never_dialled(host: str) -> None:
    async with world() as w:
        with pytest.raises(MediaError) as caught:
            await w.loader.load(f"http://{host}:{w.server.port}/", "messages.0.content.1.image_url")
        assert w.transport.dialled == [] and w.server.heads == []
        assert caught.value.param == "messages.0.content.1.image_url"
        assert host.strip("[]") not in str(caught.value)


@pytest.mark.parametrize("host", FORBIDDEN)
async def test_redirects_are_checked_as_what_they_lead_to(host: str) -> None:
    async with world() as w:
        w.server.answers["/"] = moved(f"http://{host}:{w.server.port}/secret")
        with pytest.raises(MediaError):
            await w.loader.load("http://images.test/")
        assert w.transport.dialled == [PUBLIC] and w.server.requests["/secret"] == 0


@pytest.mark.parametrize(
    "scheme", ["file:///etc/passwd", "ftp://images.test/", "data:image/png;base64,AAAA", "http://a@images.test/", ""]
)
async def test_redirects_lead_to_plain_urls_only(scheme: str) -> None:
    async with world() as w:
        w.server.answers["/"] = moved(scheme)
        with pytest.raises(MediaError):
            await w.loader.load("http://images.test/")
        assert len(w.server.heads) == 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirects_are_followed_three_times(code: int) -> None:
    async with world() as w:
        w.server.answers |= {
            f"/{n}": moved(f"{'http://other.test' if n == 2 else ''}/{n - 1}", code) for n in range(1, 5)
        }
        w.server.answers["/0"] = ok(PNG)
        assert (await w.loader.load("http://images.test/3")).data == PNG
        assert w.asked == ["images.test", "images.test", "other.test", "other.test"]
        with pytest.raises(MediaError, match="more than 3 times"):
            await w.loader.load("http://images.test/4")
        w.server.answers["/loop"] = moved("/loop", code)
        with pytest.raises(MediaError, match="more than 3 times"):
            await w.loader.load("http://images.test/loop")
        assert w.server.requests["/loop"] == 4


async def test_only_allowed_hosts_are_fetched_from() -> None:
    async with world(allowed_hosts=("images.test", ".internal.test")) as w:
        w.server.answers |= {"/": ok(PNG), "/away": moved("http://other.test/")}
        assert (await w.loader.load("http://IMAGES.test/")).data == PNG
        w.names["a.internal.test"] = ["10.0.0.1"]
        for url in (
            "http://other.test/",
            "http://sub.images.test/",
            "http://images.test/away",
            "http://a.internal.test/",
            f"http://{PUBLIC}/",
        ):
            with pytest.raises(MediaError):
                await w.loader.load(url)
        assert len(w.transport.dialled) == 2


async def test_private_addresses_are_fetched_from_when_allowed_and_metadata_never() -> None:
    async with world(allow_private=True) as w:
        w.server.answers["/"] = ok(PNG)
        for host in ("internal.test", "mixed.test", "127.0.0.1", "[::1]"):
            assert (await w.loader.load(f"http://{host}/")).data == PNG
        with pytest.raises(MediaError, match="may fetch from"):
            await w.loader.load("http://metadata.test/")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate and its key in one file, for images.test."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
    ]
    command += [
        "/CN=images.test",
        "-addext",
        "subjectAltName=DNS:images.test",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


async def test_certificates_are_checked_by_name(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    names: list[str | None] = []
    context.sni_callback = lambda _, name, __: names.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    async with world(options={"verify": trusting}) as w:
        w.server.answers |= {
            "/": ok(PNG),
            "/down": moved("http://images.test/"),
            "/other": moved("https://other.test/"),
        }
        secure = await asyncio.start_server(w.server.serve, "127.0.0.1", 0, ssl=context)
        async with secure:
            w.transport._port = secure.sockets[0].getsockname()[1]
            assert (await w.loader.load("https://images.test/")).data == PNG
            assert names == ["images.test"] and "host: images.test\r\n" in w.server.heads[0].lower()
            for url in ("https://other.test/", f"https://{PUBLIC}/", "https://images.test/other"):
                with pytest.raises(MediaError, match="cannot be reached"):
                    await w.loader.load(url)
            with pytest.raises(MediaError, match="from https to http"):
                await w.loader.load("https://images.test/down")


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with world() as w:
        w.server.answers["/"] = ok(PNG)
        assert (await w.loader.load("http://images.test/")).data == PNG


@pytest.mark.parametrize(
    ("host", "family"), [("localhost", socket.AF_INET), ("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)]
)
async def test_real_names_and_addresses(host: str, family: socket.AddressFamily) -> None:
    """Nothing invented: the system's resolver, and no detour."""
    odd = OddServer()
    try:
        server = await asyncio.start_server(odd.serve, "::1" if family == socket.AF_INET6 else "127.0.0.1", 0)
    except OSError:
        pytest.skip("this machine has no such address")
    url = f"http://{host}:{server.sockets[0].getsockname()[1]}/"
    odd.answers["/"] = ok(PNG)
    for allowed in (True, False):
        loader = MediaLoader(MediaLimits(allow_private=allowed))
        if allowed:
            assert (await loader.load(url)).data == PNG
        else:
            with pytest.raises(MediaError, match="may fetch from"):
                await loader.load(url)
        await loader.aclose()
    server.close()
    assert odd.requests == {"/": 1}


async def test_a_name_that_does_not_exist() -> None:
    loader = MediaLoader(MediaLimits())
    with pytest.raises(MediaError, match="has no address"):
        await loader.load("http://nowhere.invalid/")
    await loader.aclose()
