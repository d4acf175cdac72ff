"""Routes behind the internal secret, which OpenAPI does not show: prefill, encode, and orders to an engine."""
