"""Load tests: our server beside others, measured from the client's side. Run `python -m benchmarks --help`."""
