"""All settings as one class, read once at start and frozen.

Flags (`--max-batch-size 16`), environment variables (`MAX_BATCH_SIZE=16`) and a `.env` file set the same values, in
this order of precedence. `settings.env.example` lists them in the order of this class; a test compares the two.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import AliasChoices
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from server.settings.engine import (
    BatchSettings,
    ComputeSettings,
    EngineSettings,
    MemoryServiceSettings,
    ModelSettings,
    SettingsForTests,
    SleepSettings,
    SpeculationSettings,
    TrtllmSettings,
)
from server.settings.environment import read_env_file, variables
from server.settings.flags import did_you_mean, nearest, parse_flags, shown
from server.settings.http import HttpSettings, LimitSettings, MessageBatchSettings, ResponsesSettings
from server.settings.media import EncodeSettings, MediaSettings
from server.settings.observability import (
    EventSettings,
    HealthSettings,
    LogSettings,
    MetricSettings,
    ProfileSettings,
    TraceSettings,
)
from server.settings.replicas import DisaggregationSettings, DynamoSettings, RoutingSettings
from server.settings.visual import VisualSettings


class EngineArgsError(SettingsError):
    """Arguments for the engine are wrong: one line for each fault, with the setting that holds it."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class Settings(
    SettingsForTests,
    HealthSettings,
    ProfileSettings,
    TraceSettings,
    EventSettings,
    DynamoSettings,
    RoutingSettings,
    EncodeSettings,
    DisaggregationSettings,
    TrtllmSettings,
    VisualSettings,
    MediaSettings,
    MessageBatchSettings,
    LimitSettings,
    MetricSettings,
    LogSettings,
    HttpSettings,
    SleepSettings,
    SpeculationSettings,
    ResponsesSettings,
    BatchSettings,
    ComputeSettings,
    MemoryServiceSettings,
    EngineSettings,
    ModelSettings,  # pydantic lists the fields of the last base first
):
    """Settings of one replica: flags, environment variables (MAX_BATCH_SIZE=16) or lines of .env."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, {**read_env_file().settings})


def read_settings(arguments: Sequence[str]) -> Settings:
    """Read the settings of a command line, the environment and `.env`. Raises ValidationError and SettingsError."""
    values: dict[str, Any] = parse_flags(Settings, arguments)
    return Settings(**values)


def origins(arguments: Sequence[str]) -> dict[str, str]:
    """Return which layer set each setting that is set: the flag, the environment variable or `.env`."""
    found: dict[str, str] = {}
    flags, environment, file = parse_flags(Settings, arguments), set(map(str.lower, variables())), read_env_file()
    for name, spellings in _spellings().items():
        if name in flags:
            found[name] = "flag"
        elif spelled := next((spelling for spelling in spellings if spelling in environment), None):
            found[name] = f"environment variable {spelled.upper()}"
        elif any(spelling in file.settings for spelling in spellings):
            found[name] = ".env"
    return found


def misspelt_variables() -> Iterator[str]:
    """Yield a sentence for each environment variable whose name is almost that of a setting."""
    known = [spelling.upper() for spellings in _spellings().values() for spelling in spellings]
    for variable in variables():
        plain = variable.upper().removeprefix("TRELLIS_")
        if variable.upper() not in known and (meant := nearest(plain, known, cutoff=0.9)):
            yield f"the environment variable {variable} is no setting{did_you_mean(meant)}"


def unknown_in_file(name: str) -> str:
    """Return the sentence that refuses an unknown name in `.env`."""
    known = [spelling.upper() for spellings in _spellings().values() for spelling in spellings]
    return f"unknown setting {name.upper()} in .env{did_you_mean(nearest(name, known))}"


def _spellings() -> dict[str, tuple[str, ...]]:
    """Return the names of each setting, in lower case: its own and its aliases."""
    return {
        name: tuple(map(str, alias.choices)) if isinstance(alias := info.validation_alias, AliasChoices) else (name,)
        for name, info in Settings.model_fields.items()
    }


def example() -> str:
    """Return the text of settings.env.example: every setting with its description and default."""
    lines = [
        "# Every setting with its default. Copy to .env, or set in the environment, or pass as flags: MAX_BATCH_SIZE "
        "is --max-batch-size.",
        "",
    ]
    for name, info in Settings.model_fields.items():
        value = shown(info.get_default(call_default_factory=True))
        lines += [f"# {info.description}", f"# {name.upper()}={value}", ""]
    return "\n".join(lines)
