"""A transfer between two hosts: network namespaces that share nothing but a cable."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.environment import python_path

READER = """
import sys, msgspec
from engine.transfer.base import Offer, Read
from engine.transfer.transfers import Transfers
from tests.support.transfer_owner import content
from tests.support.transfer import Memory, ended
memory = Memory(int(sys.argv[2]))
transfers = Transfers(memory.regions, "tcp")
offers = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=tuple[Offer, ...])
ended(transfers.read(offers, [Read(0, 0, 0, int(sys.argv[2]))]))
transfers.close()
print("equal" if memory.bytes(0) == content(0, int(sys.argv[2])) else "different")
"""
SIZE = 8 << 20
ENV = {**os.environ, "PYTHONPATH": python_path()}

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    names = (f"trellis-{os.getpid()}a", f"trellis-{os.getpid()}b")
    cable = (f"tr{os.getpid()}a", f"tr{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
            ip("-n", name, "address", "add", f"10.213.7.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_tcp_between_two_hosts(hosts: tuple[str, str]) -> None:
    inside = [["ip", "netns", "exec", name, sys.executable] for name in hosts]
    command = [*inside[0], "-m", "tests.support.transfer_owner", "tcp", str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True) as owner:
        assert owner.stdout
        offers = owner.stdout.readline().strip()
        read = subprocess.run(
            [*inside[1], "-c", READER, offers, str(SIZE)],
            env=ENV,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert (read.stdout.strip(), read.stderr) == ("equal", "")
