"""Every setting, read once at start and frozen, one file per subject."""

from server.settings.engine import DEFAULT_MODEL
from server.settings.reading import EngineArgsError, Settings, example, read_settings

__all__ = ["DEFAULT_MODEL", "EngineArgsError", "Settings", "example", "read_settings"]
