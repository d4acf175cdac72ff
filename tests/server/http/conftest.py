"""The application and its OpenAPI document, for the tests of the document."""

from collections.abc import Iterator

import pytest

from tests.support.openapi import App, Document


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App() as app:
        yield app


@pytest.fixture(scope="module")
def document(app: App) -> Document:
    return app.get("/openapi.json")
