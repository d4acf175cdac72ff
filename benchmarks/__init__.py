"""Benchmarks, measured from the client's side. README.md says what each one measures and how to run it."""
