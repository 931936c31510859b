"""Mixup, an average of weights, and a learned mixture of two networks: three uses of lerp.

    lerp(a, b, w) = a + w · (b − a)
    da = (1 − w) · dy,   db = w · dy,   dw = Σ dy · (b − a)

A small network learns two interleaved spirals from few points, some of them labelled wrongly:

1. Manifold mixup: hidden vectors are mixed with those of other points of the batch, and the labels
   alike. Both ends come from the same network, so both gradients of lerp go back into it.
2. An exponential moving average of the weights, average = lerp(average, weights, 1 − decay).
3. The best mixture of the average and the last weights: its w is learned by gradient descent
   through lerp, on points that were kept for it.

From gradplan: `lerp_backward` for da and db, `log_softmax_backward` and `sum_backward`. It keeps w
in double: with w = 0.999 a bf16 gradient is scaled by 0.001, where a w that is rounded to bf16
first has become 1, and 1 − w nothing at all. The last panel of the picture shows it.

    python examples/mixup_ema.py                      # writes mixup_ema.png
    python examples/mixup_ema.py --quick
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import shared
from ml_dtypes import bfloat16
from shared import BLUE, GREY, ORANGE, PALE, Adam, Array, Parameter

import gradplan as gp

Data = tuple[Array, Array]
DECAY = 0.99


def lerp(a: Array, b: Array, w: float) -> Array:
    return a + a.dtype.type(w) * (b - a)


def spirals(
    points: int, noise: float, wrong: float, rng: np.random.Generator, dtype: Any = np.float32
) -> Data:
    """Points on two spirals, and their labels as rows (1, 0) or (0, 1), some of them wrong."""
    label = rng.integers(2, size=points)
    turn = np.sqrt(rng.uniform(0.03, 1, size=points)) * 3 * np.pi
    angle = turn + np.pi * label
    x = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / (3 * np.pi)
    x += noise * rng.standard_normal(x.shape)
    label ^= rng.random(points) < wrong
    return x.astype(dtype), np.eye(2, dtype=dtype)[label]


def initial(width: int, rng: np.random.Generator, dtype: Any = np.float32) -> list[Array]:
    """The weights and biases of 2 → width → width → 2."""
    values: list[Array] = []
    for n_in, n_out, scale in ((2, width, 6.0), (width, width, 1.0), (width, 2, 1.0)):
        weight = scale * rng.standard_normal((n_in, n_out)) / np.sqrt(n_in)
        values += [weight.astype(dtype), (0.5 * rng.standard_normal(n_out)).astype(dtype)]
    return values


class Network:
    """Two layers of tanh; the first of them may be mixed."""

    def __init__(self, values: list[Array]) -> None:
        self.parameters = [Parameter(value) for value in values]

    def forward(self, x: Array, target: Array, w: float = 0, other: Any = None) -> float:
        """The cross-entropy, with hidden vectors and targets mixed with those of row `other`."""
        w1, b1, w2, b2, w3, b3 = (p.value for p in self.parameters)
        self.x, self.w, self.other = x, w, other
        self.first = np.tanh(x @ w1 + b1)
        self.mixed, self.target = self.first, target
        if other is not None:
            self.mixed = lerp(self.first, self.first[other], w)
            self.target = lerp(target, target[other], w)
        self.second = np.tanh(self.mixed @ w2 + b2)
        logits = self.second @ w3 + b3
        logits -= logits.max(axis=1, keepdims=True)
        self.log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return -float((self.target * self.log_p).sum()) / len(x)

    def backward(self) -> None:
        w2, w3 = self.parameters[2].value, self.parameters[4].value
        share = np.array(-1 / len(self.x), self.log_p.dtype)
        dlog_p = gp.sum_backward(share, self.log_p.shape) * self.target
        dlogits = gp.log_softmax_backward(dlog_p, self.log_p)
        dsecond = (dlogits @ w3.T) * (1 - self.second**2)
        dfirst = dmixed = dsecond @ w2.T
        if self.other is not None:
            dfirst, dother = gp.lerp_backward(dmixed, self.w)
            # Row i was mixed with row other[i], each row once: its share goes back there.
            dfirst[self.other] += dother
        dfirst = dfirst * (1 - self.first**2)
        sides = ((self.x, dfirst), (self.mixed, dsecond), (self.second, dlogits))
        for i, (values, dy) in enumerate(sides):
            self.parameters[2 * i].grad = values.T @ dy
            self.parameters[2 * i + 1].grad = dy.sum(axis=0)


@dataclass
class Trained:
    """The weights at the end, their average, and the loss along the way."""

    last: list[Array]
    average: list[Array]
    # Step, loss on new points of the weights, and of their average.
    test: list[tuple[int, float, float]] = field(default_factory=list)


def mixture(a: list[Array], b: list[Array], w: float) -> list[Array]:
    return [lerp(x, y, w) for x, y in zip(a, b, strict=True)]


def train(
    start: list[Array],
    data: Data,
    test: Data,
    *,
    steps: int,
    seed: int,
    mixup: bool,
    report: Callable[[float], None],
) -> Trained:
    """Train with or without mixup, and average the weights on the way."""
    rng = np.random.default_rng(seed)
    network = Network([value.copy() for value in start])
    adam = Adam(network.parameters)
    # Adam writes in place: `last` holds the weights as they are after any step.
    run = Trained([p.value for p in network.parameters], start)
    for step in range(steps):
        chosen = rng.integers(len(data[0]), size=64)
        x, target = data[0][chosen], data[1][chosen]
        w, other = rng.beta(1, 1), rng.permutation(len(x))
        loss = network.forward(x, target, w, other if mixup else None)
        network.backward()
        adam.step(0.01)
        # The first averages would remember the start: their decay grows from 0 to DECAY.
        run.average = mixture(run.average, run.last, 1 - min(DECAY, step / (step + 10)))
        if step % max(1, steps // 60) == 0:
            averaged = Network(run.average).forward(*test)
            run.test.append((step + 1, network.forward(*test), averaged))
        report(loss)
    return run


def learn_mixture(
    a: list[Array], b: list[Array], data: Data, steps: int
) -> list[tuple[float, float]]:
    """Gradient descent on w of lerp(a, b, w): every w on the way, and its loss."""
    way: list[tuple[float, float]] = []
    w = Parameter(np.ones(1))
    adam = Adam([w])
    for step in range(steps):
        loss, dw = mixture_gradient(a, b, float(w.value[0]), data)
        way.append((float(w.value[0]), loss))
        w.grad = np.full(1, dw)
        adam.step(0.1 * (1 - step / steps))
    return way


def mixture_gradient(a: list[Array], b: list[Array], w: float, data: Data) -> tuple[float, float]:
    """The loss of lerp(a, b, w) and its derivative by w, Σ dy · (b − a)."""
    network = Network(mixture(a, b, w))
    loss = network.forward(*data)
    network.backward()
    ends = zip(network.parameters, a, b, strict=True)
    return loss, float(sum((p.grad * (y - x)).sum() for p, x, y in ends))


def kept_in_double(w: float) -> tuple[float, float]:
    """1 − w as a bf16 gradient is scaled by it: gradplan's, and with a w rounded to bf16."""
    one = np.ones(1, bfloat16)
    return float(gp.lerp_backward(one, w)[0][0]), float(1 - bfloat16(w))


def boundary(ax: Any, values: list[Array], data: Data, title: str) -> None:
    """The probability of the second class over the plane, and the training points."""
    side = np.linspace(-1.25, 1.25, 160, dtype=np.float32)
    plane = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    network = Network(values)
    network.forward(plane, np.zeros_like(plane))
    p = np.exp(network.log_p[:, 1]).reshape(len(side), -1)
    ax.contourf(side, side, p, np.linspace(0, 1, 21), cmap="RdBu", alpha=0.75)
    ax.contour(side, side, p, [0.5], colors="black", linewidths=1)
    for label, colour in enumerate((ORANGE, BLUE)):
        x, y = data[0][data[1][:, label] == 1].T
        ax.scatter(x, y, 14, colour, edgecolors="white", linewidths=0.5)
    ax.set(xticks=[], yticks=[], aspect="equal")
    ax.set_title(title)


def draw(
    plain: Trained,
    mixed: Trained,
    way: list[tuple[float, float]],
    data: Data,
    kept: Data,
    path: Path,
) -> None:
    """Three decision boundaries; the losses on new points; the mixture; 1 − w in bf16."""
    with shared.picture(path, 2, 3, figsize=(13, 8.2)) as (_, axes):
        boundary(axes[0, 0], plain.last, data, "Neither mixup nor average")
        boundary(axes[0, 1], mixed.last, data, "Mixup")
        boundary(axes[0, 2], mixed.average, data, "Mixup, averaged weights")

        steps, *losses = zip(*plain.test, strict=True)
        axes[1, 0].plot(steps, losses[0], color=GREY, lw=1, label="neither")
        steps, *losses = zip(*mixed.test, strict=True)
        axes[1, 0].plot(steps, losses[0], color=ORANGE, lw=1, label="mixup")
        axes[1, 0].plot(steps, losses[1], color=BLUE, lw=2, label="mixup, averaged")
        axes[1, 0].set(xlabel="step", ylabel="cross-entropy", ylim=(0, None))
        axes[1, 0].set_title("Loss on new points")
        axes[1, 0].legend()

        grid = np.linspace(-0.6, 1.1, 60)
        curve = [Network(mixture(mixed.average, mixed.last, w)).forward(*kept) for w in grid]
        axes[1, 1].plot(grid, curve, color=PALE, lw=3, label="loss of the mixture")
        axes[1, 1].plot(*zip(*way, strict=True), "o-", color=BLUE, ms=4, lw=1, label="descent on w")
        axes[1, 1].set(xlabel="w: 0 the average, 1 the last weights", ylabel="cross-entropy")
        axes[1, 1].set_title(f"Learned mixture: w = {way[-1][0]:.2f}")
        axes[1, 1].legend()

        small = np.logspace(-4, -1, 61)
        ours, rounded = zip(*[kept_in_double(1 - v) for v in small], strict=True)
        axes[1, 2].loglog(small, ours, color=BLUE, lw=2, label="gradplan: w kept in double")
        # What has vanished is drawn at the lower edge.
        seen = np.maximum(rounded, 1.5e-5)
        axes[1, 2].loglog(small, seen, ".", color=ORANGE, label="w rounded to bf16: in the end 0")
        axes[1, 2].set(xlabel="1 − w", ylabel="da / dy, in bf16", ylim=(1e-5, 0.5))
        axes[1, 2].set_title("Gradient of the start, w near 1")
        axes[1, 2].legend()


def main(argv: list[str] | None = None) -> int:
    """Train, report and draw; 0 if the loss fell."""
    about = "Train with mixup and averaged weights, with gradplan's gradients of lerp."
    asked = shared.Options(about, steps=3000, quick_steps=300, out="mixup_ema.png").parse(argv)
    rng = np.random.default_rng(asked.seed)
    data = spirals(200, 0.05, 0.08, rng)
    kept = spirals(500, 0.05, 0, rng)
    test = spirals(2000, 0.05, 0, rng)
    start = initial(32 if asked.quick else 96, rng)

    runs = []
    with shared.progress(2 * asked.steps) as report:
        for mixup in (False, True):
            run = train(
                start, data, test, steps=asked.steps, seed=asked.seed, mixup=mixup, report=report
            )
            runs.append(run)
    plain, mixed = runs
    way = learn_mixture(mixed.average, mixed.last, kept, 60)
    draw(plain, mixed, way, data, kept, asked.out)

    best = mixture(mixed.average, mixed.last, way[-1][0])
    named = {
        "neither": plain.last,
        "mixup": mixed.last,
        "mixup, averaged": mixed.average,
        "learned mixture": best,
    }
    losses = {name: Network(values).forward(*test) for name, values in named.items()}
    findings = [f"{name:<20} {loss:.6f} on new points" for name, loss in losses.items()]
    findings.append(f"learned w            {way[-1][0]:.4f}")
    return shared.finish(asked.out, mixed.test[0][2], losses["mixup, averaged"], *findings)


if __name__ == "__main__":
    sys.exit(main())
