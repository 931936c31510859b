"""How the tests are spread over processes."""

from __future__ import annotations

from conftest import LONG, length, scope

GRID = "tests/test_gpu_values.py::test_grid[softmax-f32-contiguous]"
LARGE = "tests/test_gpu_values.py::test_every_variant_with_large_shapes[cumsum-bf16]"
FULL = "tests/test_gpu_values.py::TestMoreThan2To31Elements::test_{}[large-bf16]"


def test_tests_that_share_kernels_share_a_process():
    assert scope(GRID, apart=False) == scope(GRID.replace("grid", "other"), apart=False)
    assert scope(GRID, apart=False) != scope(LARGE, apart=False)
    assert scope(GRID, apart=True) == scope(GRID.replace("contiguous", "sliced"), apart=True)
    assert scope(GRID, apart=True) != scope(GRID.replace("grid", "other"), apart=True)
    assert scope("tests/test_cli.py::test_it", apart=True) == "tests/test_cli.py::test_it"


def test_what_fills_a_gpu_stays_in_one_process():
    for apart in (False, True):
        assert scope(FULL.format("map"), apart) == scope(FULL.format("embedding"), apart)


def test_the_longest_come_first():
    names = [FULL.format("map"), LARGE, LARGE.replace("cumsum", "sum"), GRID, "tests/test_cli.py"]
    places = [length(name) for name in names]
    assert places == sorted(set(places))


def test_names_of_long_tests_are_those_of_tests(request):
    """A test that is renamed would lose its place."""
    root = request.config.rootpath / "tests"
    text = "".join(path.read_text() for path in root.glob("test_*gpu*.py"))
    for part in LONG:
        name = part.partition("[")[0]
        assert not name or name in text or (root / f"{name}.py").exists(), part
