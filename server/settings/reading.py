"""All settings as one class, read once at start and frozen.

Flags (`--max-batch-size 16`), environment variables (`MAX_BATCH_SIZE=16`) and a `.env` file set the same values, in
this order of precedence. `settings.env.example` lists them in the order of this class; a test compares the two.
"""

from collections.abc import Sequence

from pydantic_settings import CliApp, SettingsConfigDict, SettingsError

from server.settings.engine import EngineSettings, TrtllmSettings
from server.settings.http import HttpSettings
from server.settings.media import MediaSettings
from server.settings.observability import LogSettings, ObservabilitySettings
from server.settings.replicas import DisaggregationSettings, RoutingSettings


class EngineArgsError(SettingsError):
    """Arguments for the engine are wrong: one line for each fault, with the setting that holds it."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class Settings(
    RoutingSettings,
    ObservabilitySettings,
    MediaSettings,
    LogSettings,
    HttpSettings,
    TrtllmSettings,
    DisaggregationSettings,
    EngineSettings,  # pydantic lists the fields of the last base first
):
    """Settings of one replica: flags, environment variables (MAX_BATCH_SIZE=16) or lines of .env. --version prints the
    version.
    """

    model_config = SettingsConfigDict(
        env_file=".env",
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        populate_by_name=True,
        cli_prog_name="python -m server",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
    )


def read_settings(arguments: Sequence[str]) -> Settings:
    """Read the settings of a command line, the environment and `.env`. Raises ValidationError and SettingsError;
    `--help` exits.
    """
    return CliApp.run(Settings, cli_args=list(arguments))


def example() -> str:
    """Return the text of settings.env.example: every setting with its description and default."""
    lines = [
        "# Every setting with its default. Copy to .env, or set in the environment, or pass as flags: MAX_BATCH_SIZE "
        "is --max-batch-size.",
        "",
    ]
    for name, info in Settings.model_fields.items():
        default = info.get_default(call_default_factory=True)
        value = "" if default is None else ",".join(default) if isinstance(default, tuple) else str(default)
        if isinstance(default, bool):
            value = value.lower()
        lines += [f"# {info.description}", f"# {name.upper()}={value}", ""]
    return "\n".join(lines)
