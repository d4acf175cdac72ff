"""Faults under load, on replicas of the embedded engine that read blocks from shared memory.

Every request ends in time with the aggregated answer or a clear error, and afterwards nothing runs, waits or is held.
"""

import pytest

from tests.support.chaos import Cluster, Load, cluster, hang, kill_prefill_engine, started  # noqa: F401 - the fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TRANSFER = "auto"
ERRORS = ("refused", "cut")


def test_killed_prefill_engine(cluster: Cluster) -> None:  # noqa: F811
    """Others compute what it had, and it comes back."""
    kill_prefill_engine(cluster)


def test_killed_prefill_server(cluster: Cluster) -> None:  # noqa: F811
    with Load(cluster) as load:
        load.wait(15)
        cluster.prefill[1].server.process.kill()
        load.wait(15)
        cluster.prefill[1].restart()
        load.wait(15)
    load.check()


def test_killed_decode_engine(cluster: Cluster) -> None:  # noqa: F811
    """Its streams end with an error, and it refuses until it is back; the other goes on."""
    with Load(cluster) as load:
        load.wait(15)
        cluster.decode[0].engine.kill()
        load.wait(30)
    load.check(ERRORS)
    assert any(outcome.kind in ERRORS for outcome in load.outcomes), "nothing was tested"


@pytest.mark.parametrize("part", ["server", "engine"])
def test_hung_prefill_replica(cluster: Cluster, part: str) -> None:  # noqa: F811
    """Nothing of it answers, or only its half that cannot know."""
    server, engine = cluster.prefill[0].server.process, cluster.prefill[0].engine
    hang(cluster, [server] if part == "server" else [engine])


def test_every_replica_restarted_in_turn(cluster: Cluster) -> None:  # noqa: F811
    """No client that asks another replica when one refuses notices anything."""
    with Load(cluster, failover=True, pause=2.0) as load:
        load.wait(8)
        for replica in cluster.replicas:
            replica.server.process.terminate()
            replica.restart()
            replica.server.wait_ready()
            load.wait(8)
    load.check()
