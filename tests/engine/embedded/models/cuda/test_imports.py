"""A start on a GPU imports no library that it does not need: transformers alone takes several seconds."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[5]
HEAVY = ("diffusers", "llguidance", "sklearn", "sympy", "torch.distributed.tensor", "transformers", "xgrammar")
STAND_INS = """
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

class StandIns:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("flashinfer", "triton") else None

    def create_module(self, spec):
        return MagicMock()

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, StandIns())
"""


def test_the_runner_imports_no_transformers() -> None:
    code = (
        f"{STAND_INS}\n"
        "import engine.embedded.engine, engine.embedded.models.load, engine.embedded.models.cuda.runner\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
