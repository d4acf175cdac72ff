"""The HTTP edge: connection limits, middleware, the error table, OpenAPI and tracing."""
