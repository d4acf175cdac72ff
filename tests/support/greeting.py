"""A second, small service, hosted by tests."""

import asyncio
import logging
import sys
import warnings
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from engine.errors import EngineFailure, InvalidRequest
from engine.process.client import ServiceClient
from engine.process.service import Interface, Method, Topic
from engine.transfer.shared_bytes import Data, readable


class GreeterConfig(msgspec.Struct, frozen=True):
    greeting: str


class GreeterInfo(msgspec.Struct, frozen=True):
    greeting: str
    started: bool
    hints: tuple[str, ...] = ()


class Person(msgspec.Struct, frozen=True):
    name: str
    picture: Data = b""


class Greeting(msgspec.Struct, frozen=True):
    text: str
    picture_bytes: int = 0


hints: list[str] = []
"""Hints that this process was spawned with."""


class Greeter:
    """Greets people by name, except nobody; waits for ever for Godot."""

    def __init__(self, config: GreeterConfig) -> None:
        self._config = config
        self._started = False
        self.waiting = 0

    @property
    def info(self) -> GreeterInfo:
        return GreeterInfo(self._config.greeting, self._started, tuple(hints))

    @property
    def healthy(self) -> bool:
        return self._started

    async def start(self) -> None:
        if not self._config.greeting:
            raise EngineFailure("there is no greeting")
        if self._config.greeting == "bug":
            raise KeyError("bug")
        if self._config.greeting == "print":
            logging.getLogger(__name__).info("a line of ours")
            warnings.warn("a warning of Python", stacklevel=1)
            sys.stderr.write("printed by a library\nnot ended")
            sys.stderr.flush()
        self._started = True

    async def greet(self, person: Person) -> Greeting:
        if not person.name:
            raise InvalidRequest("a person needs a name", "name")
        if person.name == "Godot":
            self.waiting += 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.waiting -= 1
        if person.name == "bug":
            raise ZeroDivisionError("a bug")
        return Greeting(f"{self._config.greeting}, {person.name}", len(readable(person.picture)))

    async def counts(self) -> AsyncGenerator[int, None]:
        """How many calls wait for ever, whenever that changes."""
        last = -1
        while True:
            if self.waiting != last:
                last = self.waiting
                yield last
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._started = False


def _detach(person: Person) -> tuple[Person, list[Data]]:
    return Person(person.name), [person.picture]


def _attach(person: Person, parts: Sequence[Data]) -> Person:
    (picture,) = parts
    return Person(person.name, picture)


def _anticipate(hint: str) -> None:
    hints.append(hint)
    if hint == "missing":
        raise ImportError("a package is missing")


GREETER: Interface[GreeterConfig, Greeter] = Interface(
    name="tests.support.greeting:GREETER",
    noun="greeter",
    config=GreeterConfig,
    create=Greeter,
    info=GreeterInfo,
    methods={"greet": Method(Person, Greeting, lambda greeter, person: greeter.greet(person), _detach, _attach)},
    topics={"counts": Topic(int, lambda greeter: greeter.counts())},
    anticipate=_anticipate,
)


class GreeterClient(ServiceClient[GreeterInfo]):
    async def greet(self, person: Person) -> Greeting:
        greeting = await self.call("greet", person)
        assert isinstance(greeting, Greeting)
        return greeting

    def watch(self, counts: list[Any]) -> None:
        self.subscribe("counts", counts.append)
