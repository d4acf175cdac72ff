"""The circuit breaker."""

from engine.replicas.replica import LONGEST_PAUSE, Breaker


def test_the_breaker_waits_longer_after_each_failure_until_a_success() -> None:
    now = 0.0
    breaker = Breaker(lambda: now)
    assert breaker.pause == 0
    pauses = []
    for _ in range(12):
        breaker.fail()
        breaker.fail()  # of another request, meanwhile
        pauses.append(breaker.pause)
        now += breaker.pause
        assert breaker.pause == 0
    assert pauses[0] < 1 and pauses[3] > 3 * pauses[0] and max(pauses) <= 1.2 * LONGEST_PAUSE
    breaker.succeed()
    breaker.fail()
    assert breaker.pause < 1, "from the beginning"
