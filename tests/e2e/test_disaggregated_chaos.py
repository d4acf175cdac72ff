"""Faults under load, on replicas of the embedded engine that read blocks from shared memory and over TCP.

Every request ends in time with the aggregated answer or a clear error, and afterwards nothing runs, waits or is held.
"""

import signal
from collections.abc import Iterator

import pytest

from tests.support.chaos import Cluster, Load, cluster_of, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ERRORS = ("refused", "cut")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tmp_path_factory.mktemp("chaos") / "model"
    write_model(model)
    with cluster_of(model) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """Whole before, and whole and empty after a test."""
    yield started
    started.recover()


def test_killed_prefill_engine(cluster: Cluster) -> None:
    """Others compute what it had, and it comes back."""
    with Load(cluster) as load:
        load.wait(8)
        cluster.prefill[0].engine.kill()
        load.wait(16)
    load.check()


def test_killed_prefill_server(cluster: Cluster) -> None:
    with Load(cluster) as load:
        load.wait(8)
        cluster.prefill[1].server.process.kill()
        load.wait(8)
        cluster.prefill[1].restart()
        load.wait(8)
    load.check()


def test_killed_decode_engine(cluster: Cluster) -> None:
    """Its streams end with an error, and it refuses until it is back; the other goes on."""
    with Load(cluster) as load:
        load.wait(8)
        cluster.decode[0].engine.kill()
        load.wait(16)
    load.check(ERRORS)
    assert any(outcome.kind in ERRORS for outcome in load.outcomes), "nothing was tested"


@pytest.mark.parametrize("parts", ["server", "engine", "server and engine"])
def test_hung_prefill_replica(cluster: Cluster, parts: str) -> None:
    """Nothing of it answers, or only its half that cannot know."""
    replica = cluster.prefill[0]
    hung = {"server": replica.server.process, "engine": replica.engine}
    with Load(cluster) as load:
        load.wait(8)
        for part in parts.split(" and "):
            hung[part].send_signal(signal.SIGSTOP)
        try:
            load.wait(16)
        finally:
            for part in parts.split(" and "):
                hung[part].send_signal(signal.SIGCONT)
        load.wait(8)
    load.check()


def test_replicas_of_each_role_restarted_in_turn(cluster: Cluster) -> None:
    """No client that asks another replica when one refuses notices anything."""
    with Load(cluster, failover=True, pause=2.0) as load:
        load.wait(8)
        for replica in (cluster.prefill[0], *cluster.decode):
            replica.server.process.terminate()
            replica.restart()
            replica.server.wait_ready()
            load.wait(8)
    load.check()
