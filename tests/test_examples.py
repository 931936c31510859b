"""The examples run, learn something, and compute the gradients they claim to compute."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gradplan

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def char_lm() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("char_lm", EXAMPLES / "char_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name while it is being executed.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def run_example(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # The gradplan under test, wherever it was imported from: a relative PYTHONPATH would not
    # survive the change of folder.
    source = str(Path(gradplan.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "char_lm.py"), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def reported(output: str, name: str) -> float:
    match = re.search(rf"^{name}\s+(\d+\.\d+)", output, re.MULTILINE)
    assert match is not None, output
    return float(match.group(1))


@pytest.mark.slow
def test_training_lowers_the_loss_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "loss.png"
    done = run_example("--steps", "120", "--batch", "64", "--out", str(picture), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    first = reported(done.stdout, "first train loss")
    last = reported(done.stdout, "last train loss")
    validation = reported(done.stdout, "validation loss")
    assert first == pytest.approx(reported(done.stdout, "uniform guess"), abs=0.1)
    assert last < first - 1
    assert validation < first - 1
    assert "In the morning the keeper went " in done.stdout

    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data[12:16] == b"IHDR"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width >= 600
    assert height >= 400
    assert len(data) > 10_000
    assert data.endswith(b"IEND\xaeB`\x82")


@pytest.mark.slow
def test_loss_that_does_not_fall_is_a_failure(tmp_path: Path) -> None:
    # After one step the first loss is also the last.
    done = run_example("--steps", "1", "--batch", "8", cwd=tmp_path)
    assert done.returncode == 1
    assert "The loss did not fall." in done.stderr
    assert (tmp_path / "loss.png").is_file()


def test_missing_matplotlib_is_one_sentence(
    char_lm: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    assert char_lm.main(["--out", str(tmp_path / "loss.png")]) == 1
    error = capsys.readouterr().err
    assert "pip install gradplan[bench]" in error
    assert error.count("\n") == 1


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
    gradients = [p.grad.copy() for p in model.parameters]
    step = 1e-6
    for p, gradient in zip(model.parameters, gradients, strict=True):
        assert gradient.dtype == np.float64
        assert gradient.shape == p.value.shape
        numerical = np.empty_like(gradient)
        for place in np.ndindex(p.value.shape):
            value = p.value[place]
            p.value[place] = value + step
            above = loss()
            p.value[place] = value - step
            below = loss()
            p.value[place] = value
            numerical[place] = (above - below) / (2 * step)
        np.testing.assert_allclose(gradient, numerical, rtol=1e-6, atol=1e-8)
    assert all(np.any(gradient) for gradient in gradients)


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
