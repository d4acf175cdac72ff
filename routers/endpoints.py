"""The generating APIs: the application serves them, OpenAPI shows them, the router forwards them."""

from typing import Any

from routers import chat, completions, messages
from routers.endpoint import Endpoint
from routers.responses import routes as responses

ENDPOINTS: tuple[Endpoint[Any], ...] = (chat.ENDPOINT, completions.ENDPOINT, messages.ENDPOINT, responses.ENDPOINT)
