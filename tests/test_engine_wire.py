"""What passes between the processes keeps its meaning."""

import pytest

import engine.errors
from engine import wire
from engine.errors import EngineError, EngineFailure, InvalidRequest

ERRORS = [value for value in vars(engine.errors).values() if isinstance(value, type) and issubclass(value, EngineError)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_keeps_its_type(cls: type[EngineError]) -> None:
    sent = cls("message", "field") if issubclass(cls, InvalidRequest) else cls("message")
    batch = wire.decode_reports(wire.encode(wire.Reports(1, [wire.failed(7, sent)])))
    report = batch.reports[0]
    assert isinstance(report, wire.Failed)
    received = wire.error_of(report)
    assert type(received) is cls and str(received) == "message"
    assert getattr(received, "param", None) == getattr(sent, "param", None)


def test_an_error_of_another_version_is_a_failure() -> None:
    error = wire.error_of(wire.Failed(1, "NewKind", "message", None))
    assert type(error) is EngineFailure and str(error) == "message"
