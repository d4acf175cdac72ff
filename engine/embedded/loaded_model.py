"""The model of an engine: what computes it, what drafts for it, and the memory of both."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from engine.config import EmbeddedConfig, Tag
from engine.embedded.models.load import load_runner, resume_memory, state_of_files
from engine.embedded.models.runner import ModelRunner
from engine.embedded.speculation.create import create_speculator
from engine.embedded.speculation.speculator import Speculator
from engine.errors import EngineFailure

_Files = Mapping[str, Mapping[Path, tuple[int, int]]]
"""Size and time of the files in some folders."""


class LoadedModel:
    """The model runner and the speculator. A standby engine loads them while another engine serves."""

    def __init__(self, runner: ModelRunner, speculator: Speculator | None, files: _Files | None = None) -> None:
        """`speculator`: None without speculation. `files`: those that weights are read from, also after a sleep that
        drops them."""
        self.runner = runner
        self.speculator = speculator
        drafting = None if speculator is None else speculator.drafter.runner
        self._runners = [runner] if drafting is None else [runner, drafting]
        self._files = files or {}
        self._reads_files = False
        """Whether weights were dropped, and have to be read again."""

    @classmethod
    def load(cls, config: EmbeddedConfig) -> "LoadedModel":
        """Raises EngineFailure."""
        folders = [folder for folder in (config.model, config.speculative_model) if folder]
        files = _state_of(folders) if config.sleep is not None else None
        runner = load_runner(config)
        try:
            return cls(runner, create_speculator(config, runner), files)
        except Exception:
            runner.close()
            raise

    def close(self) -> None:
        for runner in self._runners:
            runner.close()

    def release_memory(self, tags: Collection[Tag], level: int) -> None:
        """See `ModelRunner`."""
        for runner in self._runners:
            runner.release_memory(tags, level)
        self._reads_files |= "weights" in tags and level > 1

    def resume_memory(self, tags: Collection[Tag]) -> None:
        """Take memory again. Raises EngineFailure, also if weights that were dropped are not in the files any more."""
        if "weights" in tags and self._reads_files and _state_of(self._files) != self._files:
            folders = " or ".join(self._files)
            raise EngineFailure(f"the files in {folders} have changed since the model was loaded")
        for runner in self._runners:
            resume_memory(runner, tags)
        self._reads_files &= "weights" not in tags


def _state_of(folders: Iterable[str]) -> _Files:
    """Raises EngineFailure."""
    try:
        return {folder: state_of_files(Path(folder)) for folder in folders}
    except OSError as error:
        raise EngineFailure(f"the files in {' or '.join(folders)} cannot be read: {error}") from error
