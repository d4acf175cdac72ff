"""Prometheus metrics, one file per subject, and the page that shows them.

One rule: parts of the product keep plain numbers, and `Polled` reads them whenever a page is rendered. Three kinds of
values cannot be read afterwards, and are pushed: observations for a histogram (with the counters of the same event),
series by peer or replica that come and go, and what the watchdog's thread sees while the event loop that polls is
blocked. What an engine reports of itself is shown as it is (`engine.py`) and not summed over API processes, which all
ask the same engine.
"""
