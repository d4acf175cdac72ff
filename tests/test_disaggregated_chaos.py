"""Faults under load, on replicas of the embedded engine: every request ends in time with the aggregated answer or a clear error, and
afterwards nothing runs, waits or is held anywhere."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_support import Cluster, Load, cluster_of, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ERRORS = ("refused", "cut")
here = pytest.mark.parametrize("started", ["auto"], indirect=True)
both_ways = pytest.mark.parametrize("started", ["auto", "tcp"], indirect=True)
"""Over TCP a read needs its owner, and breaks or stalls with it; from shared memory it does not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, model: Path) -> Iterator[Cluster]:
    with cluster_of(model, request.param) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    started.recover()


@both_ways
def test_killed_prefill_engine(cluster: Cluster) -> None:
    """Others compute what it had, and it comes back."""
    with Load(cluster) as load:
        load.wait(30)
        cluster.prefill[0].engine.kill()
        load.wait(60)
    load.check()


@here
def test_killed_prefill_server(cluster: Cluster) -> None:
    with Load(cluster) as load:
        load.wait(30)
        cluster.prefill[1].server.process.kill()
        load.wait(30)
        cluster.prefill[1].restart()
        load.wait(30)
    load.check()


@here
def test_killed_decode_engine(cluster: Cluster) -> None:
    """Its streams end with an error, and it refuses until it is back; the other goes on."""
    with Load(cluster) as load:
        load.wait(30)
        cluster.decode[0].engine.kill()
        load.wait(60)
    load.check(ERRORS)
    assert any(outcome.kind in ERRORS for outcome in load.outcomes), "nothing was tested"


@pytest.mark.parametrize(("started", "part"), [("auto", "server"), ("auto", "engine"), ("tcp", "both")], indirect=["started"])
def test_hung_prefill_replica(cluster: Cluster, part: str) -> None:
    """Nothing of it answers, or only its half that cannot know."""
    server, engine = cluster.prefill[0].server.process, cluster.prefill[0].engine
    stopped = {"server": [server], "engine": [engine], "both": [server, engine]}[part]
    with Load(cluster) as load:
        load.wait(30)
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            load.wait(60)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        load.wait(20)
    load.check()


@here
def test_every_replica_restarted_in_turn(cluster: Cluster) -> None:
    """No client that asks another replica when one refuses notices anything."""
    with Load(cluster, failover=True, pause=1.0) as load:
        load.wait(20)
        for replica in cluster.replicas:
            replica.server.process.terminate()
            replica.restart()
            replica.server.wait_ready()
            load.wait(10)
    load.check()
