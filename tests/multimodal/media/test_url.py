"""Which URLs are plain, and which hosts and addresses may be fetched from."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimodal.errors import MediaError
from multimodal.media.url import MAX_LENGTH, host_allowed, may_fetch, parse_url, redirected

ODD_URLS = [
    "http://user@images.test/a.png", "http://user:secret@images.test/", "http://images.test@127.0.0.1/", "http://127.0.0.1#@images.test\\/",
    "http://images.test\\@127.0.0.1/", "http://127.0.0.1\\.images.test/", "http:\\\\127.0.0.1/", "http://images.test\\a",
    "http://ima\tges.test/", "http://images.test\n/", "http://images.test/\r\nHost: internal", " http://images.test/",
    "http://images.test /",
    "http://images.test/a b", "http://images.test/\x00", "http://images.test/\x7f", "http://images.test/\u2028", "http://images.test/\ud800",
    "http://%31%32%37.0.0.1/", "http://images%2etest/", "http://images.test%00.evil/", "http://①②⑦.0.0.1/", "http://\uff11\uff12\uff17.0.0.1/",
    "http://images。test/", "http://ïmages.test/", "http\u017f://images.test/", "http://\u212amages.test/", "http://xn--\u00e9.test/",
    "http://0177.0.0.1/", "http://2130706433/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://127.1/", "http://127.0.1/",
    "http://127.0.0.0x1/", "http://017700000001/", "http://1.2.3.4.5/", "http://1.2.3.256/", "http://1.2.3.08/",
    "http://0/", "http://0x/",
    "http://images.test./", "http://127.0.0.1./", "http://images..test/", "http://.images.test/",
    "http://-images.test/", "http://images-/",
    "http://[::1/", "http://::1/", "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[v1.x]/", "http://[::1].images.test/",
    "http://[1.2.3.4]/", "http://[]/", "http://[:::1]/", "http://images.test:0/", "http://images.test:65536/", "http://images.test:/x",
    "http://images.test:80:80/", "http://images.test:+80/", "http://images.test:8o/", "http://images.test:٣/", "http://images.test:000080/",
    "http:/images.test/", "http:images.test", "http:///images.test/", "http://", "https://:443/", "//images.test/",
    "images.test", "",
    "ftp://images.test/", "gopher://127.0.0.1:6379/_x", "dict://127.0.0.1/", "jar:http://images.test!/",
    "javascript:alert(1)",
    "view-source:http://images.test/", "http+unix://%2Fvar%2Frun%2Fdocker.sock/",
    "http://images.test" + "/a" * MAX_LENGTH,
    f"http://{'a' * 64}.test/", f"http://{'a.' * 130}test/",
]  # fmt: skip


@pytest.mark.parametrize("url", ODD_URLS, ids=lambda url: ascii(url)[:50])
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(MediaError) as caught:
        parse_url(url)
    assert len(str(caught.value)) <= 160 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("HTTP://Images.TEST", "http://images.test/"),
        ("https://images.test:443/A.png?Sig=%2f&x=/?#part", "https://images.test/A.png?Sig=%2f&x=/?"),
        ("http://images.test:8080?q", "http://images.test:8080/?q"),
        ("http://my_bucket.images.test/é ü".replace(" ", "/"), "http://my_bucket.images.test/%C3%A9/%C3%BC"),
        ("http://1.2.3.4:081/../a//b/./", "http://1.2.3.4:81/../a//b/./"),
        ("http://[2001:DB8:0:0::1]:80/", "http://[2001:db8::1]/"),
        (
            "http://xn--mnchen-3ya.test/a'b\"<>|^`{}[]@:!$&()*+,;=~%",
            "http://xn--mnchen-3ya.test/a'b\"<>|^`{}[]@:!$&()*+,;=~%",
        ),
    ],
)
def test_plain_urls_have_one_spelling(text: str, canonical: str) -> None:
    url = parse_url(text)
    assert str(url) == canonical
    assert parse_url(canonical) == url


@given(st.text("htps:/[]@.#?%\\0127.ax\t ", max_size=30).map("http://".__add__))
def test_parsing_a_parsed_url_changes_nothing(text: str) -> None:
    try:
        url = parse_url(text)
    except MediaError:
        return
    assert parse_url(str(url)) == url
    assert "@" not in url.authority and "\\" not in str(url)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b?c#d", "https://images.test/b?c"),
        ("b", "https://images.test/a/b"),
        ("../b", "https://images.test/b"),
        ("//other.test:8443/b", "https://other.test:8443/b"),
        ("https://other.test/b", "https://other.test/b"),
    ],
)
def test_redirects_are_resolved(location: str, target: str) -> None:
    assert str(redirected(parse_url("https://images.test/a/x"), location)) == target


@pytest.mark.parametrize(
    "location",
    ["http://images.test/", "file:///etc/passwd", "data:image/png;base64,AA", "ftp://images.test/",
    "//user@images.test/", "/\tb", "\\\\b",
     "//[::1", "//0x7f.1/", "//internal.test.", "x" * (MAX_LENGTH + 1), "https:\\\\images.test", "https://:1"],
)  # fmt: skip
def test_redirects_to_elsewhere_are_refused(location: str) -> None:
    with pytest.raises(MediaError):
        redirected(parse_url("https://images.test/a"), location)


PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "::1",
    "fc00::1",
    "fdff::1",
]
NEVER = [
    "0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "168.63.129.16", "100.100.100.200", "192.0.0.192",
    "192.0.2.1", "192.88.99.1",
    "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "::127.0.0.1", "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:808:808::1", "2001::1",
    "2001:0:808:808::1",
    "2001:db8::1", "3fff::1", "100::1", "5f00::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "fd00:ec2::254",
    "fd20:ce::254",
]  # fmt: skip
GLOBAL = [
    "8.8.8.8",
    "93.184.215.14",
    "172.32.0.1",
    "100.128.0.1",
    "2606:4700::1111",
    "2a00:1450::1",
    "64:ff9b::808:808",
]


@pytest.mark.parametrize("text", [*PRIVATE, *NEVER])
def test_addresses_that_are_not_public_are_refused(text: str) -> None:
    assert not may_fetch(ip_address(text), allow_private=False)


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_can_be_allowed(text: str) -> None:
    assert may_fetch(ip_address(text), allow_private=True)


@pytest.mark.parametrize("text", NEVER)
def test_metadata_and_link_local_addresses_cannot_be_allowed(text: str) -> None:
    assert not may_fetch(ip_address(text), allow_private=True)


@pytest.mark.parametrize("text", GLOBAL)
def test_public_addresses_are_allowed(text: str) -> None:
    assert may_fetch(ip_address(text), allow_private=False)


@given(st.ip_addresses())
def test_addresses_that_may_be_fetched_are_global(address: IPv4Address | IPv6Address) -> None:
    assert not may_fetch(address, allow_private=False) or address.is_global


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("images.test", True),
        ("a.images.test", False),
        ("a.cdn.test", True),
        ("b.a.cdn.test", True),
        ("cdn.test", False),
        ("evilcdn.test", False),
    ],
)
def test_hosts_are_allowed_by_name_or_suffix(host: str, allowed: bool) -> None:
    assert host_allowed(host, ("Images.test", ".cdn.test")) is allowed
    assert host_allowed(host, ())
