"""Faults under load where blocks are read over TCP, which needs their owner: a read breaks or stalls with it."""

import pytest

from tests.support.chaos import Cluster, cluster, hang, kill_prefill_engine, started  # noqa: F401 - the fixtures

pytestmark = pytest.mark.timeout(240)
TRANSFER = "tcp"


def test_killed_prefill_engine(cluster: Cluster) -> None:  # noqa: F811
    kill_prefill_engine(cluster)


def test_hung_prefill_replica(cluster: Cluster) -> None:  # noqa: F811
    hang(cluster, [cluster.prefill[0].server.process, cluster.prefill[0].engine])
