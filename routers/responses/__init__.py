"""OpenAI's Responses: routes, conversion, store, and responses in the background."""
