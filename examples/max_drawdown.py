"""Choose portfolio weights that keep the maximum drawdown small for the growth they give.

With daily returns r[t] of the assets and weights w = softmax(θ), rebalanced daily, a path has

    equity   E[t] = Σ log(1 + w·r[s]) over s ≤ t             cumsum
    peak     P[t] = max(0, E[s] over s ≤ t)                  cummax
    drawdown D    = max over t of P[t] − E[t]                max

and the loss is a Calmar ratio upside down: the mean of D over many simulated paths, divided by the
mean growth a year. The gradient goes back through all of it, to θ.

From gradplan: `max_backward`, `cummax_backward`, `cumsum_backward`, `mean_backward` and
`softmax_backward`. Ties matter here: on weekends nothing moves, so that a Friday's peak stands
three days. `cummax_backward` gives the gradient of a peak to one of them; a mask `E == P`, the
short way to write it, gives it to all three, and with long holidays to many.

    python examples/max_drawdown.py                   # writes max_drawdown.png
    python examples/max_drawdown.py --quick
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import shared
from shared import BLUE, GREY, ORANGE, Adam, Array, Parameter

import gradplan as gp

# Mean return and volatility a year, and how much of the market's daily move each asset takes.
ASSETS = {
    "technology": (0.13, 0.22, 1.3),
    "industry": (0.09, 0.14, 1.0),
    "utilities": (0.06, 0.10, 0.5),
    "bonds": (0.03, 0.05, -0.1),
    "gold": (0.05, 0.15, -0.1),
    "trend funds": (0.05, 0.09, -0.45),
}
DAYS = 365  # a year, weekends and all


def simulate(paths: int, years: int, rng: np.random.Generator, dtype: Any = np.float32) -> Array:
    """Daily returns [assets, paths, days]: a market with rare storms, what each adds, weekends."""
    days = years * DAYS
    drift, own, beta = (np.array(c)[:, None, None] for c in zip(*ASSETS.values(), strict=True))
    # A storm begins about once in three years and lasts about seven weeks of falls and shocks.
    begins = rng.random((paths, days)) < 1 / (3 * DAYS)
    length = rng.integers(30, 70, size=(paths, days))
    ends = np.maximum.accumulate(np.where(begins, np.arange(days) + length, 0), axis=1)
    storm = np.arange(days) < ends
    market = 0.008 * rng.standard_normal((paths, days)) * (1 + storm) - 0.006 * storm
    market += 0.006 * storm.mean()
    alone = rng.standard_normal((len(ASSETS), paths, days)) * own / np.sqrt(261)
    returns = drift / 261 + beta * market + alone
    returns[..., np.arange(days) % 7 >= 5] = 0
    simulated: Array = returns.astype(dtype)
    return simulated


class Drawdown:
    """The loss above, as a function of θ."""

    def __init__(self, returns: Array) -> None:
        self.returns = returns
        self.years: float = returns.shape[-1] / DAYS
        self.theta = Parameter(np.zeros(len(returns), returns.dtype))

    @property
    def weights(self) -> Array:
        scale = np.exp(self.theta.value - self.theta.value.max())
        weights: Array = scale / scale.sum()
        return weights

    def forward(self) -> float:
        self.w = self.weights
        self.growth = 1 + np.tensordot(self.w, self.returns, axes=1)
        # A path starts at log 1 = 0, which is its first peak.
        self.equity = np.zeros((*self.growth.shape[:-1], self.growth.shape[-1] + 1), self.w.dtype)
        np.cumsum(np.log(self.growth), axis=-1, out=self.equity[:, 1:])
        self.peak = np.maximum.accumulate(self.equity, axis=-1)
        self.below = self.peak - self.equity
        self.worst = self.below.max(axis=-1)
        self.mean_worst = float(self.worst.mean())
        self.mean_growth = float(self.equity[:, -1].mean()) / self.years
        loss: float = self.mean_worst / self.mean_growth
        return loss

    def backward(self) -> None:
        paths = self.worst.shape
        dworst = np.array(1 / self.mean_growth, self.w.dtype)
        dbelow = gp.max_backward(
            gp.mean_backward(dworst, paths), self.below, self.worst, axis=-1, ties="first"
        )
        # below = peak − equity, and a peak is the equity of the day that set it.
        dequity = gp.cummax_backward(dbelow, self.equity, self.peak, axis=-1) - dbelow
        dgrowth = -self.mean_worst / self.mean_growth**2 / self.years
        dequity[:, -1] += gp.mean_backward(np.array(dgrowth, self.w.dtype), paths)
        dlog = gp.cumsum_backward(dequity[:, 1:], axis=-1)
        dw = np.tensordot(self.returns, dlog / self.growth, axes=2)
        self.theta.grad = gp.softmax_backward(dw, self.w)


def draw(before: Drawdown, after: Drawdown, losses: list[float], path: Path) -> None:
    """One path before and after, the weights, all drawdowns, and the loss."""
    # The path on which equal weights did as badly as they do on one of ten.
    shown = int(np.argsort(before.worst)[9 * len(before.worst) // 10])
    sides = (("equal weights", before, ORANGE), ("trained weights", after, BLUE))
    with shared.picture(path, 2, 3, figsize=(13.5, 7.2), width_ratios=(1.6, 1.6, 1)) as (_, axes):
        for ax, (name, side, colour) in zip(axes[0], sides, strict=False):
            equity, peak = np.exp(side.equity[shown]), np.exp(side.peak[shown])
            years = np.arange(len(equity)) / DAYS
            ax.plot(years, peak, color=GREY, lw=1.2, ls="--", label="running maximum")
            ax.plot(years, equity, color=colour, lw=1.5, label="equity")
            ax.fill_between(years, equity, peak, color=colour, alpha=0.25, label="drawdown")
            worst = int(np.argmax(side.below[shown]))
            fall = 1 - np.exp(-side.worst[shown])
            ax.vlines(worst / DAYS, equity[worst], peak[worst], color="black", lw=1.5)
            ax.set_title(f"{name}: falls by {fall:.0%}")
            ax.set(xlabel="year", ylabel="value of 1", ylim=axes[0, 0].get_ylim())
            ax.legend(loc="upper left")
        names = list(ASSETS)
        at = np.arange(len(names))
        for shift, (name, side, colour) in zip((-0.2, 0.2), sides, strict=True):
            axes[0, 2].barh(at + shift, side.weights, 0.38, color=colour, label=name)
            falls = 1 - np.exp(-side.worst)
            axes[1, 0].hist(falls, np.linspace(0, 0.4, 41), color=colour, alpha=0.6, label=name)
        axes[0, 2].set(yticks=at, yticklabels=names, xlabel="weight")
        axes[0, 2].invert_yaxis()
        axes[0, 2].set_title("Weights")
        axes[0, 2].legend()
        axes[1, 0].set(xlabel="maximum drawdown", ylabel="paths kept back")
        axes[1, 0].set_title("All paths kept back")
        axes[1, 0].legend()
        for name, side, colour in sides:
            axes[1, 1].scatter(
                1 - np.exp(-side.worst), side.equity[:, -1] / side.years, 5, colour, label=name
            )
        axes[1, 1].set(xlabel="maximum drawdown", ylabel="log growth a year")
        axes[1, 1].set_title("Growth and drawdown, path by path")
        axes[1, 1].legend()
        axes[1, 2].plot(range(1, len(losses) + 1), losses, color=BLUE)
        axes[1, 2].set(xlabel="step", ylabel="mean drawdown / growth a year")
        axes[1, 2].set_title("Loss")


def main(argv: list[str] | None = None) -> int:
    """Train, report and draw; 0 if the loss fell."""
    about = "Choose portfolio weights by their maximum drawdown, with gradplan's gradients."
    asked = shared.Options(about, steps=120, quick_steps=40, out="max_drawdown.png").parse(argv)
    rng = np.random.default_rng(asked.seed)
    paths, years = (64, 2) if asked.quick else (256, 6)

    model = Drawdown(simulate(paths, years, rng))
    kept_back = simulate(4 * paths, years, rng)
    adam = Adam([model.theta])
    losses: list[float] = []
    with shared.progress(asked.steps) as report:
        for step in range(asked.steps):
            losses.append(model.forward())
            model.backward()
            adam.step(0.1 * (1 - step / asked.steps))
            report(losses[-1])
    before, after = Drawdown(kept_back), Drawdown(kept_back)
    after.theta.value = model.theta.value
    ratios = [before.forward(), after.forward()]
    draw(before, after, losses, asked.out)

    kept = f"on paths kept back   {ratios[1]:.4f} (equal weights {ratios[0]:.4f})"
    weights = zip(ASSETS, model.weights, strict=True)
    shares = [f"  {name:<18} {weight:6.1%}" for name, weight in weights]
    return shared.finish(asked.out, losses[0], losses[-1], kept, *shares)


if __name__ == "__main__":
    sys.exit(main())
