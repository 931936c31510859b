"""What pages hold that is generated: a line `{{ name argument }}` becomes a table or a text.

Support comes from the registry, speed from `benchmarks/results`, edges from `edges.json`, the
command line from its own help, examples from their docstrings.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import gradplan
from edges import EDGES, RECORD
from gradplan.bench.markdown import commits, section
from gradplan.bench.results import read
from gradplan.kinds import OpCategory
from gradplan.registry import ELEMENTS, KINDS, MAX_RANK, Engine, KindSpec

__all__ = ["GENERATED", "expanded"]

ROOT = Path(__file__).resolve().parents[1]
_ODD_SHAPES = ROOT / "benchmarks" / "measured" / "h200_odd.json"
_DIRECTIVE = re.compile(r"^\{\{ (\w+) ?([^}]*?) \}\}$", re.MULTILINE)
_HELP_COLUMNS = 86
_TITLES = {"torch": "PyTorch", "jax": "JAX"}


def expanded(text: str) -> str:
    """The page with every directive replaced; an unknown one is a KeyError."""

    def replaced(found: re.Match[str]) -> str:
        return GENERATED[found[1]](*found[2].split())

    return _DIRECTIVE.sub(replaced, text)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _wide(text: str) -> str:
    """A cell that is not squeezed into a column of single words on a phone."""
    return f'<span class="wide">{text}</span>'


def _specs(family: str | None) -> list[KindSpec]:
    category = None if family is None else OpCategory.coerce(family)
    return [spec for spec in KINDS.values() if category in (None, spec.category)]


def _support(family: str | None = None) -> str:
    """Kinds with their formulas and needs."""
    specs = _specs(family)
    tied = any(spec.ties for spec in specs)
    headings = ["kind", "dx", "needs x", "needs y", *(["ties"] if tied else []), "function"]
    rows = [
        [
            f"`{spec.kind.value}`",
            _wide(spec.formula),
            spec.x.value,
            spec.y.value,
            *([" ".join(f"`{rule.value}`" for rule in spec.ties) or "–"] if tied else []),
            f"[`{spec.function}`][gradplan.{spec.function}]",
        ]
        for spec in specs
    ]
    return _table(headings, rows)


def _reach() -> str:
    """What holds for every kind."""
    elements = ", ".join(f"`{element.value}`" for element in ELEMENTS)
    return f"Every kind takes {elements}, rank 1 to {MAX_RANK} and any strides."


def _engines() -> str:
    """Engines, and the kinds that each runs."""
    rows = [
        [
            f"**{engine.value}**",
            ", ".join(f"`{spec.kind.value}`" for spec in KINDS.values() if spec.engine is engine),
        ]
        for engine in Engine
    ]
    return _table(["engine", "kinds"], rows)


def _measured(family: str | None = None) -> str:
    """The committed results, of a family or of all."""
    kinds = {spec.kind.value for spec in _specs(family)}
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = read(path)
        rows = [row for row in found["rows"] if row["kind"] in kinds]
        costs = {kind: cost for kind, cost in found["host_us"].items() if kind in kinds}
        if rows:
            parts.append(section({**found, "rows": rows, "host_us": costs}))
    return "\n\n".join(parts) or "No results are committed yet."


def _other_shapes() -> str:
    """What was measured of shapes that are no powers of two."""
    return section(read(_ODD_SHAPES))


def _commits(which: str) -> str:
    """Whose kernels the rows are of: those of the `results`, or of `other_shapes`."""
    paths = {
        "results": sorted((ROOT / "benchmarks" / "results").glob("*.json")),
        "other_shapes": [_ODD_SHAPES],
    }
    return "\n\n".join(commits(read(path)) for path in paths[which])


def _edges(family: str) -> str:
    """The experiments of a family, side by side."""
    record = json.loads(RECORD.read_text())
    if len(record["rows"]) != len(EDGES):
        raise KeyError(f"{RECORD.name} is of other experiments: run docs/edges.py")
    libraries = list(record["versions"])
    titles = [f"{_TITLES[name]} {record['versions'][name]}" for name in libraries]
    rows = []
    for edge, row in zip(EDGES, record["rows"], strict=True):
        if edge.spec.category is not OpCategory.coerce(family):
            continue
        results = [row["gradplan"], *(row[name] for name in libraries)]
        differs = ["" if one == row["gradplan"] else "**" for one in results]
        cells = [f"{mark}{one}{mark}" for mark, one in zip(differs, results, strict=True)]
        rows.append([f"`{edge.kind.value}`: {edge.title}", _wide(edge.given), *cells])
    return _table(["edge", "given", "gradplan", *titles], rows)


def _help(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gradplan", *command, "--help"],
        env={**os.environ, "COLUMNS": str(_HELP_COLUMNS), "TERM": "dumb", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rstrip()


def _commands(how: str = "") -> str:
    """The help of the command line and of every command that it lists; `brief`: the list alone."""
    whole = _help()
    listed = re.findall(r"^ {4}([a-z]+)\s+(\S.*(?:\n {12,}.*)*)", whole, re.MULTILINE)
    if how == "brief":
        return _table(
            ["command", "what it does"],
            [[f"`gradplan {name}`", " ".join(said.split())] for name, said in listed],
        )
    fenced = "``` {{ .text .help }}\n{}\n```".format
    each = [f"## gradplan {name}\n\n{fenced(_help(name))}" for name, _ in listed]
    return "\n\n".join([fenced(whole), *each])


def _examples() -> str:
    """The scripts under `examples/`: what each says of itself."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        if "__main__" not in text:  # what the others share
            continue
        said = ast.get_docstring(ast.parse(text)) or ""
        title, _, rest = said.partition("\n")
        parts.append(f"## {path.name}\n\n{title}\n\n{rest.strip()}")
    return "\n\n".join(parts)


def _defined(module: str) -> list[str]:
    """The public names of the package that a module defines, in its order."""
    tree = ast.parse((ROOT / "src" / "gradplan" / f"{module}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in gradplan.__all__
    ]


def _reference(module: str, *without: str) -> str:
    """What the docstrings say of them."""
    chosen = [name for name in _defined(module) if name not in without]
    return "\n\n".join(f"::: gradplan.{name}" for name in chosen)


def _enums() -> str:
    """The enums with their members."""
    parts = []
    for name in _defined("kinds"):
        members = ", ".join(f"`{member.name}`" for member in getattr(gradplan, name))
        parts.append(f"::: gradplan.{name}\n\nMembers: {members}.")
    return "\n\n".join(parts)


def _members(module: str) -> str:
    """The public functions and classes of a module of its own, by its source alone."""
    path = ROOT / "src" / "gradplan" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return "\n\n".join(f"::: gradplan.{module}.{name}" for name in names if name != "linalg")


def _include(name: str) -> str:
    """A page of the repository."""
    return (ROOT / name).read_text()


def _picture(name: str) -> str:
    """A drawing, within the page: it takes the colours of the theme."""
    drawing = (Path(__file__).parent / "pictures" / f"{name}.svg").read_text()
    return f"<div>\n{drawing}</div>"


GENERATED: dict[str, Callable[..., str]] = {
    "commands": _commands,
    "commits": _commits,
    "edges": _edges,
    "engines": _engines,
    "enums": _enums,
    "examples": _examples,
    "include": _include,
    "measured": _measured,
    "members": _members,
    "other_shapes": _other_shapes,
    "picture": _picture,
    "reach": _reach,
    "reference": _reference,
    "support": _support,
}
