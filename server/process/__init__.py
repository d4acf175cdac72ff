"""Processes of a replica: launching, serving, logging and the machine's GPUs."""
