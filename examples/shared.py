"""What the examples share: their options, a progress bar, Adam, and the picture at the end."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# The arithmetic follows the dtype of the parameters: float32 to train, float64 when a test compares
# the gradients with finite differences.
Array = npt.NDArray[np.floating[Any]]
Indices = npt.NDArray[np.int64]

# One palette for all pictures: dark and light blue, orange, green, purple, grey.
BLUE, PALE, ORANGE, GREEN, PURPLE, GREY = (
    "#1f5fa8",
    "#9ec5e8",
    "#d1622b",
    "#2f8f5b",
    "#7b4fa3",
    "0.35",
)
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "grid.color": "0.9",
    "legend.frameon": False,
    "legend.fontsize": 9,
}

console = Console(highlight=False)


def positive(text: str) -> int:
    """An argparse type: a whole number of at least one."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


class Options:
    """The options that every example takes; `add` more before `parse`."""

    def __init__(self, about: str, *, steps: int, quick_steps: int, out: str) -> None:
        self.default_steps = {False: steps, True: quick_steps}
        self.parser = argparse.ArgumentParser(description=about)
        self.add("--steps", type=positive, help=f"steps of training ({steps})")
        self.add("--seed", type=int, default=0, help="seed of everything (%(default)s)")
        self.add("--quick", action="store_true", help="a smaller problem, done in seconds")
        self.add("--out", type=Path, default=Path(out), help="the picture (%(default)s)")

    def add(self, name: str, **options: Any) -> None:
        self.parser.add_argument(name, **options)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        options = self.parser.parse_args(argv)
        if options.steps is None:
            options.steps = self.default_steps[options.quick]
        if options.out.is_dir():
            self.parser.error(f"--out names a folder, not a picture: {options.out}")
        # Asked before the training and not after it, when the answer would cost half a minute.
        if importlib.util.find_spec("matplotlib") is None:
            sys.exit(
                "The picture is drawn by matplotlib, which is missing: pip install gradplan[bench]"
            )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        return options


@contextmanager
def progress(steps: int, label: str = "training") -> Iterator[Callable[[float], None]]:
    """A progress bar; what it yields is called once a step, with the loss."""
    with Progress(
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task(label, total=steps, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


class Parameter:
    """A trained array and the gradient that the last backward pass left for it."""

    def __init__(self, value: Array) -> None:
        self.value = value
        self.grad: Array = np.zeros_like(value)


class Adam:
    """Adam with decoupled weight decay on the matrices."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        betas: tuple[float, float] = (0.9, 0.99),
        epsilon: float = 1e-8,
        decay: float = 0.0,
    ) -> None:
        self.parameters = parameters
        self.betas = betas
        self.epsilon = epsilon
        self.decay = decay
        self.moments = [(np.zeros_like(p.value), np.zeros_like(p.value)) for p in parameters]
        self.count = 0

    def step(self, rate: float) -> None:
        self.count += 1
        b1, b2 = self.betas
        # Both averages start at zero; these factors undo that bias.
        scale1, scale2 = 1 / (1 - b1**self.count), 1 / (1 - b2**self.count)
        for p, (m, v) in zip(self.parameters, self.moments, strict=True):
            m += (1 - b1) * (p.grad - m)
            v += (1 - b2) * (p.grad * p.grad - v)
            if p.value.ndim > 1:
                p.value *= 1 - rate * self.decay
            p.value -= (rate * scale1) * m / (np.sqrt(scale2 * v) + self.epsilon)


@contextmanager
def picture(path: Path, *shape: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, saved as a PNG picture when the block is left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*shape, layout="constrained", **options)
        yield figure, axes
        figure.savefig(path, format="png", dpi=150)
        plt.close(figure)


def finish(path: Path, first: float, last: float, *findings: str) -> int:
    """Report the losses, what else was found and the picture; exit code 0 if the loss fell."""
    losses = (f"first loss           {first:.6f}", f"last loss            {last:.6f}")
    for line in (*losses, *findings, f"picture: {path}"):
        console.print(line, markup=False, soft_wrap=True)
    if not last < first:
        print("The loss did not fall.", file=sys.stderr)
        return 1
    return 0
