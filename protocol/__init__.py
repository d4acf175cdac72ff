"""Wire types only: what clients send and receive."""
