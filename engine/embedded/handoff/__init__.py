"""Handing a prefilled sequence to another replica, and fetching its KV blocks."""
