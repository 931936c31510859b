"""Fit Cox's proportional hazards to survival data with ties and censoring.

Subject i with features x[i] has the score η[i] = x[i]·β and the hazard h(t) · exp(η[i]). Nothing
need be known of h: of all who are still at risk when i dies, the partial likelihood asks how likely
it was to be i. With the subjects sorted by time, those at risk are a suffix, and the loss is

    loss = − mean over deaths i of  η[i] − log Σ exp(η[j]) over j with time[j] ≥ time[i]

Breslow's rule: deaths of the same day share the sum of their whole day.

From gradplan: `logcumsumexp_backward` with `reverse=True`, one row as long as there are subjects
(100,000 here), in linear work. Its factors are exp(x − y) ≤ 1, so no score is too large: the loss
does not change when all scores are shifted, and neither does this gradient, where exp followed by
cumsum overflows. `mean_backward` starts it off.

    python examples/cox_survival.py                   # writes cox_survival.png
    python examples/cox_survival.py --quick
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import shared
from shared import BLUE, GREEN, GREY, ORANGE, Adam, Array, Indices, Parameter

import gradplan as gp

TRUE = np.array([0.9, -0.7, 0.5, -0.35, 0.2, 0.1, 0.0, 0.0])


@dataclass(frozen=True)
class Cohort:
    """Subjects sorted by the day on which they died (`died`) or were last seen alive."""

    features: Array
    day: Indices
    died: npt.NDArray[np.bool_]

    @staticmethod
    def simulate(subjects: int, rng: np.random.Generator, dtype: Any = np.float32) -> Cohort:
        """Weibull lifetimes, with correlated features, in whole days: so there are ties."""
        features = rng.standard_normal((subjects, len(TRUE)))
        features[:, 1:] += 0.5 * features[:, :-1]
        hazard = np.exp(features @ TRUE)
        lifetime = 900 * (rng.exponential(size=subjects) / hazard) ** (1 / 1.4)
        leaves = rng.uniform(100, 2500, size=subjects)
        day = np.ceil(np.minimum(lifetime, leaves)).astype(np.int64)
        order = np.argsort(day, kind="stable")
        return Cohort(features[order].astype(dtype), day[order], (lifetime <= leaves)[order])


class PartialLikelihood:
    """The loss above, as a function of the scores."""

    def __init__(self, cohort: Cohort) -> None:
        self.deaths = np.flatnonzero(cohort.died)
        # At risk on a day is everyone from the first subject of that day on.
        self.first = np.searchsorted(cohort.day, cohort.day[self.deaths], side="left")

    def forward(self, scores: Array) -> float:
        self.scores = scores
        # NumPy adds one by one: a hundred thousand roundings, were they float32's.
        sums = np.logaddexp.accumulate(scores[::-1], dtype=np.float64)[::-1]
        self.at_risk: Array = sums.astype(scores.dtype)
        return -float(np.mean(scores[self.deaths] - self.at_risk[self.first]))

    def backward(self) -> Array:
        minus_one = np.array(-1, self.scores.dtype)
        dterms = gp.mean_backward(minus_one, self.deaths.shape)
        # A day's sum is used once for every death of the day.
        dat_risk = np.bincount(self.first, -dterms, len(self.scores)).astype(self.scores.dtype)
        dscores: Array = gp.logcumsumexp_backward(
            dat_risk, self.scores, self.at_risk, axis=-1, reverse=True
        )
        dscores[self.deaths] += dterms
        return dscores


def exp_cumsum_backward(loss: PartialLikelihood) -> Array:
    """The same gradient as it is often written, exp(η) · Σ 1 / Σ exp(η): it overflows."""
    share = 1 / len(loss.deaths)
    deaths = np.bincount(loss.first, minlength=len(loss.scores)).astype(loss.scores.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        hazard = np.exp(loss.scores)
        dscores: Array = share * hazard * np.cumsum(deaths / np.cumsum(hazard[::-1])[::-1])
    dscores[loss.deaths] -= share
    return dscores


def shifted(model: CoxModel, shift: float) -> tuple[float, float]:
    """How far the scores' gradient moves when all scores do, relative: ours, exp and cumsum."""
    scores = model.features @ model.beta.value
    model.loss.forward(scores)
    before = model.loss.backward()
    model.loss.forward(scores + scores.dtype.type(shift))
    ours, naive = (
        float(np.linalg.norm(after - before) / np.linalg.norm(before))
        for after in (model.loss.backward(), exp_cumsum_backward(model.loss))
    )
    return ours, naive


class CoxModel:
    """scores = features · β."""

    def __init__(self, cohort: Cohort) -> None:
        self.features = cohort.features
        self.loss = PartialLikelihood(cohort)
        self.beta = Parameter(np.zeros(cohort.features.shape[1], cohort.features.dtype))

    def forward(self) -> float:
        return self.loss.forward(self.features @ self.beta.value)

    def backward(self) -> None:
        self.beta.grad = self.features.T @ self.loss.backward()

    def standard_errors(self, step: float = 1e-2) -> Array:
        """From the curvature of the loss: its Hessian, as differences of the gradient."""
        fitted = self.beta.value.copy()
        rows = []
        for i in range(len(fitted)):
            sides = []
            for sign in (1, -1):
                self.beta.value = fitted.copy()
                self.beta.value[i] += sign * step
                self.forward()
                self.backward()
                sides.append(self.beta.grad.astype(np.float64))
            rows.append((sides[0] - sides[1]) / (2 * step))
        self.beta.value = fitted
        errors: Array = np.sqrt(np.diag(np.linalg.inv(rows)) / len(self.loss.deaths))
        return errors


def concordance(cohort: Cohort, scores: Array) -> float:
    """Of all pairs whose order of death is known, the share in which the first had more risk."""
    sooner = cohort.died[:, None] & (cohort.day[:, None] < cohort.day)
    difference = scores[:, None] - scores
    return float((sooner * ((difference > 0) + 0.5 * (difference == 0))).sum() / sooner.sum())


def kaplan_meier(day: Indices, died: npt.NDArray[np.bool_]) -> tuple[Indices, Array]:
    """The share that is alive after each day, of subjects sorted by day."""
    days, first = np.unique(day, return_index=True)
    deaths = np.add.reduceat(died.astype(np.float64), first)
    return days, np.cumprod(1 - deaths / (len(day) - first))


def draw(
    model: CoxModel, test: Cohort, losses: list[float], ranks: list[tuple[int, float]], path: Path
) -> None:
    """Coefficients with their intervals, survival by risk, and how both were found."""
    with shared.picture(path, 1, 3, figsize=(13, 4.3)) as (_, (left, middle, right)):
        at = np.arange(len(TRUE))
        reach = 1.96 * model.standard_errors()
        left.axhline(0, color=GREY, lw=0.8)
        left.bar(at, TRUE, color="0.85", label="true")
        estimate = {
            "fmt": "o",
            "color": BLUE,
            "capsize": 5,
            "ms": 4,
            "label": "estimated, 95 % interval",
        }
        left.errorbar(at, model.beta.value, reach, **estimate)
        left.set(xlabel="feature", ylabel="log hazard ratio β", xticks=at)
        left.set_title("Coefficients")
        left.legend()

        scores = test.features @ model.beta.value
        limits = np.quantile(scores, (1 / 3, 2 / 3))
        group = np.searchsorted(limits, scores)
        for i, (name, colour) in enumerate((("low", GREEN), ("middle", BLUE), ("high", ORANGE))):
            chosen = group == i
            days, alive = kaplan_meier(test.day[chosen], test.died[chosen])
            label = f"{name} predicted risk"
            middle.step(days, alive, where="post", color=colour, label=label)
        middle.set(xlabel="day", ylabel="share alive (Kaplan-Meier)", ylim=(0, 1.02))
        middle.set_title("Subjects kept back, by predicted risk")
        middle.legend()

        right.plot(range(1, len(losses) + 1), losses, color=BLUE)
        right.set_xlabel("step")
        right.set_ylabel("− log partial likelihood per death", color=BLUE)
        right.set_title("Loss and concordance")
        twin = right.twinx()
        twin.plot(*zip(*ranks, strict=True), "o-", color=ORANGE, ms=3)
        twin.set_ylabel("concordance of those kept back", color=ORANGE)
        twin.grid(visible=False)


def main(argv: list[str] | None = None) -> int:
    """Fit, report and draw; 0 if the loss fell."""
    about = "Fit a Cox model to simulated survival data, with gradplan's gradients."
    asked = shared.Options(about, steps=100, quick_steps=80, out="cox_survival.png").parse(argv)
    rng = np.random.default_rng(asked.seed)
    train = Cohort.simulate(4_000 if asked.quick else 100_000, rng)
    test = Cohort.simulate(1_000 if asked.quick else 2_000, rng)

    model = CoxModel(train)
    adam = Adam([model.beta])
    losses: list[float] = []
    ranks: list[tuple[int, float]] = []
    shared.console.print(
        f"{len(train.day)} subjects, {train.died.sum()} deaths on "
        f"{len(np.unique(train.day[train.died]))} days"
    )
    with shared.progress(asked.steps) as report:
        for step in range(asked.steps):
            losses.append(model.forward())
            if step % max(1, asked.steps // 50) == 0:
                ranks.append((step + 1, concordance(test, test.features @ model.beta.value)))
            model.backward()
            adam.step(0.06 * (1 - step / asked.steps))
            report(losses[-1])
    draw(model, test, losses, ranks, asked.out)

    ours, naive = shifted(model, 100)
    return shared.finish(
        asked.out,
        losses[0],
        losses[-1],
        f"concordance          {ranks[-1][1]:.4f} (at the start {ranks[0][1]:.4f})",
        "true coefficients    " + " ".join(f"{b:6.3f}" for b in TRUE),
        "estimated            " + " ".join(f"{b:6.3f}" for b in model.beta.value),
        f"furthest off         {np.abs(model.beta.value - TRUE).max():.4f}",
        f"scores shifted by 100: the gradient moves by {ours:.1e}, exp and cumsum: {naive}",
    )


if __name__ == "__main__":
    sys.exit(main())
