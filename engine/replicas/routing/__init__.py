"""The router: which replica holds which KV blocks, and which one a request goes to."""
