"""Reads values and histograms out of a Prometheus text page."""

import math
import re


def total(page: str, name: str) -> float:
    """A counter or gauge, summed over label sets; 0 if the page has none."""
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))
    )


def histogram(page: str, name: str) -> dict[float, float]:
    """Cumulative counts by upper bound, summed over label sets; empty if the page has no such histogram."""
    counts: dict[float, float] = {}
    for labels, value in re.findall(rf"^{re.escape(name)}_bucket\{{(.*)\}} (\S+)", page, re.MULTILINE):
        found = re.search(r'le="([^"]+)"', labels)
        assert found is not None, f"a bucket of {name} has no bound"
        bound = math.inf if found[1] == "+Inf" else float(found[1])
        counts[bound] = counts.get(bound, 0.0) + float(value)
    return counts


def percentile_between(before: dict[float, float], after: dict[float, float], percent: float) -> float:
    """Upper bound of the bucket that holds the percentile of what was observed between two scrapes; NaN if nothing was."""
    grown = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = grown.get(math.inf, 0.0)
    if not total:
        return math.nan
    return next(bound for bound, count in grown.items() if count >= total * percent / 100)
