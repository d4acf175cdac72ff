"""Model runners: what computes one step on a device."""
