"""Speculative decoding: drafters propose tokens, one step checks them, and only what the model itself draws is kept."""
