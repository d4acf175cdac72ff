"""Prometheus metrics, one file per subject, and the page that shows them."""
