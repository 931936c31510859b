"""The wheel works by itself: built, installed into a fresh environment, used elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gradplan as gp
from gradplan.registry import KINDS

ROOT = Path(__file__).resolve().parents[1]


def ran(command: list[str | Path], cwd: Path, **more: str) -> str:
    # Nothing of the repository may be found through the environment.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**kept, **more},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_works_outside_the_repository(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    ran([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"gradplan-{gp.__version__}-py3-none-any.whl"

    inside = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    packaged = {
        str(path.relative_to(source))
        for path in (source / "gradplan").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    results = (ROOT / "benchmarks" / "results").glob("*.json")
    packaged |= {f"gradplan/bench/recorded/{path.name}" for path in results}
    assert {name for name in inside if name.startswith("gradplan/")} == packaged
    assert "gradplan/py.typed" in inside

    python = environment(tmp_path / "venv")
    ran(
        [
            *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
            *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
        ],
        tmp_path,
    )
    where = ran([python, "-c", "import gradplan; print(gradplan.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    assert "Typing :: Typed" in ran(
        [python, "-c", "import importlib.metadata as m; print(m.metadata('gradplan'))"], tmp_path
    )

    command = python.with_name("gradplan")
    assert ran([command, "--version"], tmp_path).strip() == f"gradplan {gp.__version__}"
    listed = ran([command, "list"], tmp_path, COLUMNS="200")
    for spec in KINDS.values():
        assert spec.function in listed

    example = ROOT / "examples" / "char_lm.py"
    ran([python, example, "--steps", "40", "--batch", "32"], tmp_path)
    assert (tmp_path / "loss.png").is_file()


def environment(folder: Path) -> Path:
    """A fresh environment that sees the packages of this one, but none of its editable installs."""
    ran([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    own = ran([python, "-c", "import site; print(site.getsitepackages()[0])"], folder).strip()
    # Folders that a .pth file names are searched, but their own .pth files are not read.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(own) / "others.pth").write_text("\n".join(others) + "\n")
    return python
