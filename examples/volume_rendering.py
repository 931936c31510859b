"""Carve a scene out of a solid block by volume rendering, the compositing of NeRF.

A ray meets samples k = 0, 1, ... from front to back, each with a transparency t[k] and a colour
c[k]; what it sees is

    w[k] = (1 − t[k]) · Π t[j] over j < k        opaque, and not hidden
    C    = Σ w[k] · c[k]  +  Π t[j] over all j · background

A grid of voxels, four numbers each, is fitted to pictures of a known scene by gradient descent on
|C − target|², in NumPy alone; a view that was kept back shows what was learned.

From gradplan: `cumprod_backward` for the transmittance, `sum_backward` for the colour, and
`embedding_backward` to bring the samples' gradients back to their voxels, in a fixed order; rays
that pass beside the grid read a row of air, the table's `padding_idx`.

Solid voxels have t = 0 exactly, and the block that this starts from is solid. The textbook's
gradient of a cumulative product divides by t, 0 / 0 there, and one NaN is soon everywhere; NeRF's
own code adds 1e-10 to keep away from it. `cumprod_backward` never divides: a solid voxel has the
gradient of what it hides, so it can be carved away. The picture shows both.

    python examples/volume_rendering.py               # writes volume_rendering.png
    python examples/volume_rendering.py --quick
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import shared
from shared import BLUE, ORANGE, Adam, Array, Indices, Parameter

import gradplan as gp

BACKGROUND = 1.0  # white
CumprodBackward = Callable[[Array, Array, Array], Array]


def plan_cumprod(dy: Array, x: Array, y: Array) -> Array:
    """dx[k] = y[k−1] · S[k] with S[k] = dy[k] + x[k+1] · S[k+1]: no division."""
    dx: Array = gp.cumprod_backward(dy, x, y, axis=-1)
    return dx


def quotient_cumprod(dy: Array, x: Array, y: Array) -> Array:
    """dx[k] = (Σ dy[j] · y[j] over j ≥ k) / x[k]: the textbook's, right where no x is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.cumsum((dy * y)[..., ::-1], axis=-1)[..., ::-1] / x


class Renderer:
    """Colours of rays through a table of voxels: columns transparency, red, green, blue."""

    def __init__(self, table: Array, cumprod_backward: CumprodBackward = plan_cumprod) -> None:
        self.table = Parameter(table)
        self.cumprod_backward = cumprod_backward

    def forward(self, voxels: Indices) -> Array:
        """The colours [rays, 3] of rays that meet these voxels [rays, samples]."""
        self.voxels = voxels
        values = self.table.value[voxels]
        self.t, self.colour = values[..., 0], values[..., 1:]
        self.through = np.cumprod(self.t, axis=-1)
        # What reaches sample k has passed those before it: the product without its own.
        self.reaches = np.ones_like(self.t)
        self.reaches[:, 1:] = self.through[:, :-1]
        self.weight = self.reaches * (1 - self.t)
        seen = (self.weight[..., None] * self.colour).sum(axis=1)
        colours: Array = seen + BACKGROUND * self.through[:, -1:]
        return colours

    def backward(self, dy: Array) -> None:
        # Every term of the sum has the gradient of the sum.
        dterms = gp.sum_backward(dy, self.colour.shape, axis=1)
        dcolour = dterms * self.weight[..., None]
        dweight = (dterms * self.colour).sum(axis=-1)
        # weight = reaches · (1 − t), and reaches is through, one place later.
        dthrough = np.empty_like(self.through)
        dthrough[:, :-1] = (dweight * (1 - self.t))[:, 1:]
        dthrough[:, -1] = BACKGROUND * dy.sum(axis=-1)
        dt = self.cumprod_backward(dthrough, self.t, self.through) - dweight * self.reaches
        dvalues = np.concatenate([dt[..., None], dcolour], axis=-1)
        rows = len(self.table.value)
        gp.embedding_backward(dvalues, self.voxels, rows, padding_idx=rows - 1, out=self.table.grad)


def scene(grid: int) -> Array:
    """The known scene: an orange ball on a blue-green chequered floor, under a ring."""
    axis = (np.arange(grid) + 0.5) / grid * 2 - 1
    x, y, z = np.meshgrid(axis, axis, axis, indexing="ij")
    table = np.ones((grid, grid, grid, 4), np.float32)

    def put(where: Any, *colour: float) -> None:
        table[where] = (0, *colour)

    put((z < -0.7) & (z > -0.85), 0.15, 0.35, 0.65)
    chequer = np.floor(2.5 * x + 20) + np.floor(2.5 * y + 20)
    put((z < -0.7) & (z > -0.85) & (chequer % 2 == 0), 0.55, 0.8, 0.75)
    put(x**2 + y**2 + (z + 0.25) ** 2 < 0.45**2, 0.9, 0.45, 0.15)
    put((np.hypot(x, y) - 0.7) ** 2 + (z - 0.25) ** 2 < 0.14**2, 0.5, 0.25, 0.65)
    return with_air(table)


def block(grid: int, rng: np.random.Generator) -> Array:
    """What the fit starts from: thin grey fog around a solid block, t = 0 exactly."""
    table = np.full((grid, grid, grid, 4), 0.97, np.float32)
    table[..., 1:] = 0.5 + 0.1 * rng.standard_normal(table[..., 1:].shape)
    inner = slice(grid // 5, -(grid // 5))
    table[inner, inner, inner, 0] = 0
    return with_air(table)


def with_air(table: Array) -> Array:
    """The voxels as rows, and behind them the row of air that rays outside of the grid read."""
    return np.concatenate([table.reshape(-1, 4), np.ones((1, 4), np.float32)])


def camera(azimuth: float, height: float, pixels: int, samples: int, grid: int) -> Indices:
    """The voxels that the rays of one picture meet, [pixels², samples]."""
    eye = 3.2 * np.array(
        [
            math.cos(azimuth) * math.cos(height),
            math.sin(azimuth) * math.cos(height),
            math.sin(height),
        ]
    )
    forward = -eye / np.linalg.norm(eye)
    right = np.cross(forward, [0, 0, 1])
    right /= np.linalg.norm(right)
    up = np.cross(right, forward)
    screen = ((np.arange(pixels) + 0.5) / pixels - 0.5) * 0.95
    directions = forward + screen[None, :, None] * right - screen[:, None, None] * up
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    depths = np.linspace(1.5, 4.9, samples)
    points = eye + depths[:, None] * directions.reshape(-1, 1, 3)
    cells = np.floor((points + 1) / 2 * grid).astype(np.int64)
    inside = ((cells >= 0) & (cells < grid)).all(axis=-1)
    rows = np.ravel_multi_index(tuple(np.moveaxis(cells, -1, 0)), (grid,) * 3, mode="clip")
    return np.where(inside, rows, grid**3)


def fit(
    renderer: Renderer,
    rays: Indices,
    target: Array,
    *,
    steps: int,
    batch: int,
    seed: int,
    report: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Train on random rays; the loss of every step. Stops at the first loss that is no number."""
    rng = np.random.default_rng(seed)
    adam = Adam([renderer.table])
    losses: list[float] = []
    for step in range(steps):
        chosen = rng.integers(len(rays), size=batch)
        error = renderer.forward(rays[chosen]) - target[chosen]
        losses.append(float(np.mean(error**2)))
        report(losses[-1])
        if math.isnan(losses[-1]):
            break
        renderer.backward((2 / error.size) * error)
        adam.step(0.05 * (1 - step / steps))
        # Transparencies and colours stay in [0, 1]: both ends are reached, and left again.
        np.clip(renderer.table.value, 0, 1, out=renderer.table.value)
    return losses


def along_a_ray(cumprod_backward: CumprodBackward) -> Array:
    """The gradient of one ray's red by its transparencies: fog, then a grey wall hiding red."""
    table = np.ones((12, 4))
    table[:, 0] = (0.9, 0.8, 0.9, 0.8, 0.9, 0, 0.9, 0.9, 0, 0.9, 0.9, 0.9)
    table[:, 1] = 6 * [0.5] + 6 * [1.0]
    table[:5, 1] = (0.2, 0.8, 0.4, 0.1, 0.9)
    renderer = Renderer(np.concatenate([table, np.ones((1, 4))]), cumprod_backward)
    renderer.forward(np.arange(12)[None])
    renderer.backward(np.array([[1.0, 0, 0]]))
    return renderer.table.grad[:12, 0]


def draw(
    views: dict[str, list[Array]], losses: list[float], naive: list[float], path: Path
) -> None:
    """Views of the scene, the start and the result; the loss; the gradient along one ray."""
    widths = (1, 1, 1, 1.9)
    with shared.picture(path, 3, 4, figsize=(12, 7.2), width_ratios=widths) as (figure, axes):
        for row, (name, images) in zip(axes, views.items(), strict=True):
            for ax, image in zip(row, images, strict=False):
                ax.imshow(np.clip(image, 0, 1))
                ax.set(xticks=[], yticks=[])
                ax.spines[:].set_visible(False)
            row[0].set_ylabel(name, fontsize=12)
        for ax, title in zip(axes[0], ("trained on", "trained on", "kept back"), strict=False):
            ax.set_title(title)
        for ax in axes[:, 3]:
            ax.remove()
        cells = axes[0, 3].get_gridspec()[:, 3].subgridspec(2, 1)

        curve = figure.add_subplot(cells[0])
        curve.semilogy(range(1, len(losses) + 1), losses, color=BLUE, lw=1, label="gradplan")
        finite = [loss for loss in naive if math.isfinite(loss)]
        label = f"dividing by t: NaN from step {len(finite) + 1} on"
        curve.semilogy(range(1, len(finite) + 1), finite, "X", color=ORANGE, ms=10, label=label)
        curve.set(xlabel="step", ylabel="mean squared error")
        curve.set_title("Loss, starting from a block that is solid")
        curve.legend()

        ray = figure.add_subplot(cells[1])
        ray.plot(along_a_ray(plan_cumprod), "o", color=BLUE, mfc="none", ms=10, label="gradplan")
        ray.plot(
            along_a_ray(quotient_cumprod),
            "x",
            ms=7,
            color=ORANGE,
            label="dividing by t: NaN there",
        )
        for wall in (5, 8):
            ray.axvspan(wall - 0.5, wall + 0.5, color="0.88", zorder=0)
        ray.set(xlabel="sample along the ray", ylabel="∂ red / ∂ t")
        ray.set_title("Gradient along a ray; grey: solid, t = 0")
        ray.legend(loc="lower right")


def main(argv: list[str] | None = None) -> int:
    """Fit, report and draw; 0 if the loss fell."""
    about = "Fit a voxel grid to pictures by volume rendering, with gradplan's gradients."
    options = shared.Options(about, steps=1500, quick_steps=100, out="volume_rendering.png")
    asked = options.parse(argv)
    grid, pixels, samples, batch = (14, 20, 36, 512) if asked.quick else (32, 64, 80, 2048)
    count = 16 if asked.quick else 40
    start_seed, ray_seed = np.random.SeedSequence(asked.seed).generate_state(2)

    # Around the scene in steps of the golden ratio, rising from below the floor to far above it.
    cameras = [
        camera(2 * math.pi * 0.618 * i, 1.5 * (i + 0.5) / count - 0.3, pixels, samples, grid)
        for i in range(count)
    ]
    shown = (cameras[count // 3], cameras[2 * count // 3], camera(0.9, 0.6, pixels, samples, grid))
    rays = np.concatenate(cameras)
    truth = Renderer(scene(grid))
    target = truth.forward(rays)
    start = block(grid, np.random.default_rng(start_seed))

    def looks(renderer: Renderer) -> list[Array]:
        return [renderer.forward(v).reshape(pixels, pixels, 3) for v in shown]

    def run(renderer: Renderer, report: Callable[[float], None]) -> list[float]:
        seed = int(ray_seed)
        return fit(renderer, rays, target, steps=asked.steps, batch=batch, seed=seed, report=report)

    naive = run(Renderer(start.copy(), quotient_cumprod), lambda loss: None)
    fitted = Renderer(start.copy())
    with shared.progress(asked.steps) as report:
        losses = run(fitted, report)
    views = {"scene": looks(truth), "start": looks(Renderer(start)), "result": looks(fitted)}
    draw(views, losses, naive, asked.out)

    before, after = (
        -10 * math.log10(np.mean((views[v][2] - views["scene"][2]) ** 2))
        for v in ("start", "result")
    )
    return shared.finish(
        asked.out,
        losses[0],
        losses[-1],
        f"view kept back       {after:.2f} dB (at the start {before:.2f})",
        f"dividing by t        loss {naive[-1]} at step {len(naive)}",
    )


if __name__ == "__main__":
    sys.exit(main())
