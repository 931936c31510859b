"""The examples run, learn something, and compute the gradients they claim to compute."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gradplan

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Import an example, or what they share, by name."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in {path.stem for path in EXAMPLES.glob("*.py")} - before:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def char_lm(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("char_lm")


def run_example(
    name: str, *arguments: str, cwd: Path, torch: bool = False
) -> subprocess.CompletedProcess[str]:
    # The gradplan under test, wherever it was imported from: a relative PYTHONPATH would not
    # survive the change of folder.
    source = [str(Path(gradplan.__file__).resolve().parents[1])]
    if not torch:
        # What needs only NumPy must work where torch cannot be imported.
        (cwd / "without").mkdir()
        (cwd / "without" / "torch.py").write_text("raise ImportError('there is no torch')\n")
        source.insert(0, str(cwd / "without"))
    path = os.pathsep.join(filter(None, [*source, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=cwd,
        # One thread: other tests run beside this one, and OpenMP's threads wait for each other.
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONIOENCODING": "utf-8",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def reported(output: str, name: str) -> float:
    match = re.search(rf"^{name}\s+(-?\d+\.\d+(?:e[-+]\d+)?)", output, re.MULTILINE)
    assert match is not None, output
    return float(match.group(1))


def check_picture(path: Path) -> None:
    """A whole PNG of a decent size, with something on it."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data[12:16] == b"IHDR"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width >= 600
    assert height >= 400
    assert len(data) > 10_000
    assert data.endswith(b"IEND\xaeB`\x82")


def quick(name: str, folder: Path, *arguments: str, torch: bool = False) -> str:
    """What the example prints at its reduced size; the picture is checked."""
    out = folder / f"{name}.png"
    done = run_example(name, "--quick", "--out", str(out), *arguments, cwd=folder, torch=torch)
    assert done.returncode == 0, done.stdout + done.stderr
    check_picture(out)
    return done.stdout


def check_gradients(loss: Callable[[], float], *checked: tuple[Any, Any], step=1e-6) -> None:
    """Gradients against central differences of the loss, which reads the values in place."""
    for value, gradient in checked:
        assert gradient.dtype == np.float64
        assert gradient.shape == value.shape
        assert np.any(gradient)
        numerical = np.empty_like(gradient)
        for place in np.ndindex(value.shape):
            kept = value[place]
            value[place] = kept + step
            above = loss()
            value[place] = kept - step
            below = loss()
            value[place] = kept
            numerical[place] = (above - below) / (2 * step)
        np.testing.assert_allclose(gradient, numerical, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_training_lowers_the_loss_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "loss.png"
    done = run_example(
        "char_lm", "--steps", "120", "--batch", "64", "--out", str(picture), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr

    first = reported(done.stdout, "first loss")
    last = reported(done.stdout, "last loss")
    validation = reported(done.stdout, "validation loss")
    assert first == pytest.approx(reported(done.stdout, "uniform guess"), abs=0.1)
    assert last < first - 1
    assert validation < first - 1
    assert "In the morning the keeper went " in done.stdout

    check_picture(picture)


@pytest.mark.slow
def test_loss_that_does_not_fall_is_a_failure(tmp_path: Path) -> None:
    # After one step the first loss is also the last.
    done = run_example("char_lm", "--steps", "1", "--batch", "8", cwd=tmp_path)
    assert done.returncode == 1
    assert "The loss did not fall." in done.stderr
    assert (tmp_path / "loss.png").is_file()


def test_missing_matplotlib_is_one_sentence(
    char_lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    # sys.exit with a text prints it, and the exit code is 1.
    with pytest.raises(SystemExit, match=r"^[^\n]* pip install gradplan\[bench\]$"):
        char_lm.main(["--out", str(tmp_path / "loss.png")])


@pytest.mark.parametrize("option", [["--steps", "0"], ["--batch", "-3"], ["--out", "."]])
def test_bad_options_are_refused(char_lm: ModuleType, option: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        char_lm.main(option)
    assert stopped.value.code == 2


@pytest.mark.parametrize("forget", [False, True])
def test_gradients_match_finite_differences(char_lm: ModuleType, forget: bool) -> None:
    vocabulary, context, batch = 7, 3, 6
    model = char_lm.CharModel(
        vocabulary, context=context, embedding=2, hidden=5, blocks=2, seed=3, dtype=np.float64
    )
    rng = np.random.default_rng(5)
    # Away from the initial ones and zeros, where a mistake in a gain or a bias could hide.
    for p in model.parameters:
        p.value += 0.3 * rng.standard_normal(p.value.shape)
    # 18 indices into 7 rows: some characters repeat, and their gradients have to add up.
    indices = rng.integers(vocabulary, size=(batch, context))
    targets = rng.integers(vocabulary, size=batch)

    def loss() -> float:
        # A fresh generator forgets the same characters every time.
        return float(model.forward(indices, targets, np.random.default_rng(0) if forget else None))

    loss()
    model.backward()
    check_gradients(loss, *[(p.value, p.grad.copy()) for p in model.parameters])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_training_is_deterministic_and_keeps_its_dtype(char_lm: ModuleType, dtype: Any) -> None:
    corpus = char_lm.Corpus(char_lm.TEXT.read_text(encoding="ascii"), 8)

    def run() -> tuple[Any, Any]:
        model = char_lm.CharModel(
            len(corpus.characters), context=8, embedding=4, hidden=16, seed=1, dtype=dtype
        )
        history = char_lm.train(model, corpus, steps=10, batch=16, seed=2)
        for p in model.parameters:
            assert p.value.dtype == dtype
            assert p.grad.dtype == dtype
        return history, [p.value for p in model.parameters]

    history, values = run()
    again, values_again = run()
    assert history == again
    for a, b in zip(values, values_again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_validation_text_is_never_seen_in_training(char_lm: ModuleType) -> None:
    # A text of all different characters: a character shared by both parts would be a leak.
    text = "".join(chr(i) for i in range(0x4E00, 0x4E00 + 9000))
    corpus = char_lm.Corpus(text, 16)
    assert len(corpus.validation) > 500
    assert not np.intersect1d(corpus.train, corpus.validation).size


@pytest.mark.slow
def test_volume_rendering_carves_the_scene(tmp_path: Path) -> None:
    output = quick("volume_rendering", tmp_path)
    assert reported(output, "last loss") < reported(output, "first loss") / 3
    assert reported(output, "view kept back") > 14
    assert re.search(r"dividing by t +loss nan", output)


def test_volume_rendering_gradients(load: Callable[[str], ModuleType]) -> None:
    volume = load("volume_rendering")
    rng = np.random.default_rng(1)
    # Five rays over nine voxels, some met twice by one ray; the last row of the table is air.
    table = rng.random((10, 4))
    table[[2, 5, 6], 0] = 0
    table[9] = 1
    voxels = rng.integers(9, size=(5, 7))
    voxels[3, 4:] = 9
    target = rng.random((5, 3))
    renderer = volume.Renderer(table)

    def loss() -> float:
        return float(((renderer.forward(voxels) - target) ** 2).sum())

    renderer.backward(2 * (renderer.forward(voxels) - target))
    # Air is no parameter: its gradient is 0 and its differences are not.
    assert not renderer.table.grad[9].any()
    check_gradients(loss, (table[:9], renderer.table.grad[:9].copy()))


def test_volume_rendering_shows_where_division_fails(load: Callable[[str], ModuleType]) -> None:
    volume = load("volume_rendering")
    ours = volume.along_a_ray(volume.plan_cumprod)
    divided = volume.along_a_ray(volume.quotient_cumprod)
    solid = np.isin(np.arange(12), (5, 8))
    np.testing.assert_array_equal(np.isnan(divided), solid)
    np.testing.assert_allclose(ours[~solid], divided[~solid], rtol=1e-12, atol=1e-15)
    # The first wall hides something redder than itself, the second is hidden.
    assert ours[5] > 0.1
    assert ours[8] == 0


@pytest.mark.slow
def test_cox_survival_recovers_the_coefficients(tmp_path: Path) -> None:
    output = quick("cox_survival", tmp_path)
    assert reported(output, "last loss") < reported(output, "first loss") - 0.2
    assert reported(output, "furthest off") < 0.08
    assert reported(output, "concordance") > 0.68
    assert re.search(r"the gradient moves by \d\.\de-0[4-9], exp and cumsum: nan", output)


def test_cox_survival_gradients(load: Callable[[str], ModuleType]) -> None:
    cox = load("cox_survival")
    rng = np.random.default_rng(2)
    cohort = cox.Cohort.simulate(60, rng, np.float64)
    # Spans of a hundred days: most deaths now share theirs with others.
    cohort = cox.Cohort(cohort.features, cohort.day // 100, cohort.died)
    model = cox.CoxModel(cohort)
    assert len(np.unique(model.loss.first)) < len(model.loss.first) / 2
    model.beta.value = rng.standard_normal(len(cox.TRUE))

    # The loss by its definition, subject by subject.
    scores = cohort.features @ model.beta.value
    terms = [
        scores[i] - np.log(np.exp(scores[cohort.day >= cohort.day[i]]).sum())
        for i in np.flatnonzero(cohort.died)
    ]
    assert model.forward() == pytest.approx(-np.mean(terms), rel=1e-12)
    model.backward()
    np.testing.assert_allclose(
        model.loss.backward(), cox.exp_cumsum_backward(model.loss), rtol=1e-9, atol=1e-14
    )
    check_gradients(model.forward, (model.beta.value, model.beta.grad.copy()))
    # Scores that exp cannot hold, even in float64.
    ours, naive = cox.shifted(model, 1000)
    assert ours < 1e-11
    assert np.isnan(naive)


@pytest.mark.slow
def test_max_drawdown_is_lowered_on_new_paths_too(tmp_path: Path) -> None:
    output = quick("max_drawdown", tmp_path)
    first = reported(output, "first loss")
    assert reported(output, "last loss") < 0.7 * first
    assert reported(output, "on paths kept back") < 0.7 * first


def test_max_drawdown_gradients(load: Callable[[str], ModuleType]) -> None:
    drawdown = load("max_drawdown")
    rng = np.random.default_rng(4)
    model = drawdown.Drawdown(drawdown.simulate(6, 1, rng, np.float64))
    model.theta.value = 0.3 * rng.standard_normal(len(drawdown.ASSETS))
    model.forward()
    # Weekends prolong peaks, even the worst drawdown's own: the gradient must count each once.
    tops = np.take_along_axis(model.peak, model.below.argmax(axis=-1)[:, None], axis=-1)
    assert ((model.equity == tops).sum(axis=-1) == 3).any()
    model.backward()
    check_gradients(model.forward, (model.theta.value, model.theta.grad.copy()))


@pytest.mark.slow
def test_char_lm_torch_trains_alike_with_and_without(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    output = quick("char_lm_torch", tmp_path, "--batch", "64", torch=True)
    assert reported(output, "last loss") < reported(output, "first loss") - 1
    assert reported(output, "furthest apart") < 1e-3
    assert reported(output, "torch ") > 0
    assert reported(output, r"under enable\(\)") > 0


def test_char_lm_torch_has_the_gradients_of_numpy(
    load: Callable[[str], ModuleType], char_lm: ModuleType, ran: Counter[str]
) -> None:
    torch = pytest.importorskip("torch")
    module = load("char_lm_torch")
    source = char_lm.CharModel(7, context=3, embedding=2, hidden=5, seed=3, dtype=np.float64)
    rng = np.random.default_rng(5)
    for p in source.parameters:
        p.value += 0.3 * rng.standard_normal(p.value.shape)
    indices, targets = rng.integers(7, size=(6, 3)), rng.integers(7, size=6)
    expected = source.forward(indices, targets, np.random.default_rng(0))
    source.backward()

    batch = [torch.from_numpy(a) for a in (indices, targets, source.forget.scale)]
    for mode in (module.nullcontext, module.gt.enable):
        ran.clear()
        model = module.TorchCharModel(source)
        with mode():
            loss = model(*batch)
            loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        for mine, theirs in zip(model.parameters(), source.parameters, strict=True):
            grad = mine.grad.numpy()
            if any(mine is m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)):
                grad = grad.T
            np.testing.assert_allclose(grad, theirs.grad, rtol=1e-9, atol=1e-12)
    assert ran["embedding"] == 1
    assert ran["log_softmax"] == 1
    assert ran["var"] == len(source.blocks) + 1


@pytest.mark.slow
def test_mixup_ema_learns_and_averages(tmp_path: Path) -> None:
    output = quick("mixup_ema", tmp_path)
    first = reported(output, "first loss")
    for name in ("neither", "mixup ", "mixup, averaged", "learned mixture"):
        assert reported(output, name) < first / 2


def test_mixup_ema_gradients(load: Callable[[str], ModuleType]) -> None:
    module = load("mixup_ema")
    rng = np.random.default_rng(6)
    x, target = module.spirals(5, 0.1, 0, rng, np.float64)
    a, b = (module.initial(4, rng, np.float64) for _ in range(2))
    other = rng.permutation(5)
    network = module.Network(a)

    def loss() -> float:
        return float(network.forward(x, target, 0.3, other))

    loss()
    network.backward()
    check_gradients(loss, *[(p.value, p.grad.copy()) for p in network.parameters])

    # The third gradient of lerp, by its weight; beyond both ends too.
    for w in (-0.5, 0.3, 1.0):
        at = np.array([w])
        dw = module.mixture_gradient(a, b, w, (x, target))[1]
        check_gradients(
            lambda at=at: module.mixture_gradient(a, b, at[0], (x, target))[0],
            (at, np.array([dw])),
        )


def test_mixup_ema_shows_what_rounding_the_weight_loses(load: Callable[[str], ModuleType]) -> None:
    kept, rounded = load("mixup_ema").kept_in_double(1 - 1e-3)
    assert kept == pytest.approx(1e-3, rel=2**-8)
    assert rounded == 0


def test_readme_lists_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert set(re.findall(r"^\| \[(\w+\.py)\]", table, re.MULTILINE)) == scripts - {"shared.py"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_docstring_names_the_command(path: Path) -> None:
    if path.stem != "shared":
        text = path.read_text(encoding="utf-8")
        assert f"python examples/{path.name} " in text.split('"""')[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cox_survival", "max_drawdown", "mixup_ema", "volume_rendering"])
def test_same_seed_same_numbers_same_picture(
    load: Callable[[str], ModuleType], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(seed: int) -> tuple[str, bytes]:
        out = tmp_path / "picture.png"
        load(name).main(["--quick", "--steps", "6", "--seed", str(seed), "--out", str(out)])
        # Without the progress bar, which tells the time.
        return capsys.readouterr().out.partition("first loss")[2], out.read_bytes()

    first = run(3)
    assert run(3) == first
    assert run(4) != first
