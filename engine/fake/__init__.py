"""The deterministic engine and encoder that ship for tests and development."""
