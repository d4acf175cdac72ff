"""Work that gives way: the priorities of its thread and its session, during it and afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SESSION = Path("/proc/self/autogroup")
SCRIPT = """
import asyncio, os, threading
from pathlib import Path
from engine.kit.priority import give_way

def show():
    session, thread = Path("/proc/self/autogroup"), threading.get_native_id()
    print(os.getpriority(os.PRIO_PROCESS, thread), *(session.read_text().split()[-1:] if session.exists() else ()))

show()
asyncio.run(give_way(show))
show()
"""


def shown(leads: bool) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], start_new_session=leads, capture_output=True, text=True, check=True
    )
    return [line.split() for line in done.stdout.splitlines()]


def test_the_thread_has_the_lowest_priority_and_the_process_keeps_its_own() -> None:
    own = str(os.getpriority(os.PRIO_PROCESS, 0))
    assert [nice for nice, *_ in shown(leads=False)] == [own, "19", own]


@pytest.mark.skipif(not SESSION.exists(), reason="this system does not weigh sessions")
def test_a_session_of_its_own_gives_way_until_the_work_is_done() -> None:
    assert [session for _, *session in shown(leads=True)] == [["0"], ["19"], ["0"]]


@pytest.mark.skipif(not SESSION.exists(), reason="this system does not weigh sessions")
def test_the_session_of_others_keeps_its_priority() -> None:
    before = SESSION.read_text().split()[-1:]  # the system's first session has no value: the file is empty
    assert [session for _, *session in shown(leads=False)] == [before] * 3


@pytest.mark.parametrize(("work", "status"), [("1 / 0", 1), ("sys.exit(3)", 3)])
def test_errors_reach_the_caller(work: str, status: int) -> None:
    script = f"import asyncio, sys; from engine.kit.priority import give_way; asyncio.run(give_way(lambda: {work}))"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == status
