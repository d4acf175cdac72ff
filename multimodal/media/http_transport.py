"""The HTTP transport to image servers."""

import httpx


class Transport(httpx.AsyncHTTPTransport):
    """httpx's own transport, which raises `httpx.ConnectError` for a connection that is lost as soon as it is made.

    With anyio 4 on uvloop that is an AttributeError: anyio reads the address of a socket that uvloop has closed
    already.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was lost as soon as it was made", request=request) from error
