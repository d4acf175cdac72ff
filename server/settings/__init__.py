"""Every setting, parsed once and frozen, one file per subject."""

from server.settings.replica import Settings

__all__ = ["Settings"]
