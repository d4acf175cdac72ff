"""Read values and histograms from a page in Prometheus' text format."""

import math
import re


def total(page: str, name: str) -> float:
    """Return a counter or gauge, summed over labels; 0 if the page does not have it."""
    return sum(
        float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))
    )


def histogram(page: str, name: str) -> dict[float, float]:
    """Return cumulative counts by upper bound, summed over labels; empty if the page does not have them."""
    counts: dict[float, float] = {}
    for labels, value in re.findall(rf"^{re.escape(name)}_bucket\{{(.*)\}} (\S+)", page, re.MULTILINE):
        found = re.search(r'le="([^"]+)"', labels)
        assert found is not None, f"a bucket of {name} has no bound"
        bound = math.inf if found[1] == "+Inf" else float(found[1])
        counts[bound] = counts.get(bound, 0.0) + float(value)
    return counts


def percentile_between(before: dict[float, float], after: dict[float, float], percent: float) -> float:
    """Return the upper bound of the bucket with the percentile between two scrapes; NaN without observations."""
    grown = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = grown.get(math.inf, 0.0)
    if not total:
        return math.nan
    return next(bound for bound, count in grown.items() if count >= total * percent / 100)
