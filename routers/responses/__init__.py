"""OpenAI's Responses: routes, conversion, what is stored, and what runs in the background."""
