"""Sweeps: measure configurations under many loads, find the smallest that meets targets, and scale by metrics.

plan.py          what is measured: a YAML file, or flags
deployments.py   start what is measured, and stop it
loads.py         one measurement: samples from the built-in client or aiperf, and their figures
results.py       the folder of results: measurements that resume, JSON, CSV and the page
sweep.py         the loop over all of them
profile.py       the smallest configuration that meets targets, and the files that start it
conversion.py    configurations of one role from those of others, and sizes
planner.py       the number of replicas of a role, by metrics
"""
