"""Train char_lm.py's model in PyTorch, without and with `gradplan.torch.enable()`.

The model is that of char_lm.py, from the same weights and on the same batches, written as anyone
would write it in PyTorch: no line of it names gradplan. Copies of it are trained side by side,

    loss = model(windows, targets); loss.backward()              # torch's gradients
    with gradplan.torch.enable():                                # the same code, gradplan's
        loss = model(windows, targets)
        loss.backward()

Under `enable()` the gradients of embedding, var_mean, log_softmax and mean are gradplan's, the
matrix products' are torch's, and forward results are torch's either way: the two losses agree to
rounding. Training magnifies any rounding, so a third copy tells how much to expect of it: torch
alone, with one weight of the start moved to the next number of its type. The copies take turns
in going first, so that none is timed with the warmer cache; a step of so small a model is some
dozens of short calls, and what their time shows is mostly the cost of calling.

    python examples/char_lm_torch.py                  # needs torch; writes char_lm_torch.png
    python examples/char_lm_torch.py --dtype float64  # the difference is rounding: here less of it
    python examples/char_lm_torch.py --quick
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import shared
import torch
from char_lm import TEXT, CharModel, Corpus, LayerNorm, learning_rate, smooth
from shared import BLUE, GREY, ORANGE
from torch import Tensor, nn

import gradplan.torch as gt


class Norm(nn.Module):  # type: ignore[misc]
    """Layer norm by its formula; torch's own is one fused kernel, which `enable()` leaves alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return self.gain * (x - mean) * torch.rsqrt(var + LayerNorm.EPSILON) + self.bias


class Block(nn.Module):  # type: ignore[misc]
    """y = x + relu(norm(x)) W + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.relu(self.norm(x)))


class TorchCharModel(nn.Module):  # type: ignore[misc]
    """The layers of `CharModel`, and its loss, from its weights."""

    def __init__(self, source: CharModel) -> None:
        super().__init__()
        vocabulary, width = source.embed.table.value.shape
        n_in, hidden = source.mix.weight.value.shape
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(n_in, hidden)
        self.blocks = nn.Sequential(*[Block(hidden) for _ in source.blocks])
        self.norm = Norm(hidden)
        self.head = nn.Linear(hidden, vocabulary)
        # Both list their parameters in the order of the layers; torch keeps W of x W + b as Wᵀ.
        linear = {id(m.weight) for m in self.modules() if isinstance(m, nn.Linear)}
        for mine, theirs in zip(self.parameters(), source.parameters, strict=True):
            value = theirs.value.T if id(mine) in linear else theirs.value
            mine.data = torch.from_numpy(value.copy())

    def forward(self, indices: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        """The loss; `scale` is what char_lm.py's `Forget` multiplies the characters by."""
        h = (self.embed(indices) * scale).flatten(1)
        logits = self.head(self.norm(self.blocks(self.mix(h))))
        log_p = torch.log_softmax(logits, dim=-1)
        return -log_p.gather(-1, targets[:, None]).mean()


class Run:
    """One copy of the model, its optimiser, and what was measured of it."""

    def __init__(self, source: CharModel, mode: Callable[[], Any]) -> None:
        self.model = TorchCharModel(source)
        self.mode = mode
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 1.0}, {"params": vectors}]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
        self.losses: list[float] = []
        self.ms: list[float] = []

    def step(self, batch: tuple[Tensor, Tensor, Tensor], rate: float) -> None:
        started = time.perf_counter()
        with self.mode():
            loss = self.model(*batch)
            self.adam.zero_grad()
            loss.backward()
        self.ms.append(1e3 * (time.perf_counter() - started))
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.losses.append(loss.item())


def train(
    source: CharModel,
    corpus: Corpus,
    steps: int,
    batch: int,
    seed: int,
    report: Callable[[float], None],
) -> tuple[Run, Run, Run]:
    """Train on the same batches with torch's gradients, with gradplan's, and from a moved start."""
    rng = np.random.default_rng(seed)
    runs = Run(source, nullcontext), Run(source, gt.enable), Run(source, nullcontext)
    moved = runs[2].model.mix.weight.data
    moved[0, 0] = torch.nextafter(moved[0, 0], torch.full_like(moved[0, 0], torch.inf))
    ones = np.ones((batch, source.context, 1), source.embed.table.value.dtype)
    for step in range(steps):
        windows = torch.from_numpy(corpus.train[rng.integers(len(corpus.train), size=batch)])
        scale = torch.from_numpy(source.forget.forward(ones, rng))
        rate = learning_rate(step, steps, 3e-3)
        for run in runs if step % 2 else runs[::-1]:
            run.step((windows[:, :-1], windows[:, -1], scale), rate)
        report(runs[1].losses[-1])
    return runs


def apart(a: Run, b: Run) -> Any:
    return np.abs(np.subtract(a.losses, b.losses))


def draw(theirs: Run, ours: Run, moved: Run, dtype: str, path: Path) -> None:
    """Both losses, how far they are apart, and the time of a step."""
    named = ((theirs, "torch", ORANGE, 5), (ours, "torch, under enable()", BLUE, 1.5))
    steps = range(1, len(ours.losses) + 1)
    with shared.picture(path, 1, 3, figsize=(13, 4.3)) as (_, (left, middle, right)):
        for run, name, colour, width in named:
            # The first line is wide, or the second would hide it.
            left.plot(steps, smooth(run.losses), color=colour, lw=width, label=name)
        left.set(xlabel="step", ylabel="loss (nats per character)", ylim=(0, None))
        left.set_title("Training loss, smoothed")
        left.legend()

        for run, label, mark in (
            (moved, "one weight moved by one bit", "."),
            (ours, "enable()", "+"),
        ):
            colour = GREY if run is moved else BLUE
            middle.semilogy(steps, apart(run, theirs), mark, color=colour, ms=3, label=label)
        middle.set(xlabel="step", ylabel="|loss − loss of torch|")
        middle.set_title(f"How far from torch ({dtype})")
        middle.legend(loc="lower right")

        longest = np.quantile([theirs.ms, ours.ms], 0.9)
        limits = np.linspace(min(theirs.ms + ours.ms), longest, 50)
        for run, name, colour, _ in named:
            label = f"{name}: median {np.median(run.ms):.2f} ms"
            right.hist(run.ms, limits, color=colour, alpha=0.6, label=label)
        right.set(xlabel="ms a step, forward and backward", ylabel="steps")
        right.set_title("Time on this machine")
        right.set_ylim(0, 1.25 * right.get_ylim()[1])
        right.legend(loc="upper right")


def main(argv: list[str] | None = None) -> int:
    """Train, report and draw; 0 if the loss fell."""
    about = "Train a character model in PyTorch, without and with gradplan.torch.enable()."
    options = shared.Options(about, steps=1000, quick_steps=60, out="char_lm_torch.png")
    options.add("--batch", type=shared.positive, default=128, help="windows a step (%(default)s)")
    options.add("--dtype", choices=("float32", "float64"), default="float32", help="%(default)s")
    asked = options.parse(argv)

    # Matrices this small gain nothing from more threads, and one alone is timed more evenly.
    torch.set_num_threads(1)
    model_seed, batch_seed = np.random.SeedSequence(asked.seed).generate_state(2)
    corpus = Corpus(TEXT.read_text(encoding="ascii"), 16)
    source = CharModel(
        len(corpus.characters),
        hidden=48 if asked.quick else 192,
        seed=int(model_seed),
        dtype=np.dtype(asked.dtype),
    )
    with shared.progress(asked.steps) as report:
        theirs, ours, moved = train(
            source, corpus, asked.steps, asked.batch, int(batch_seed), report
        )
    draw(theirs, ours, moved, asked.dtype, asked.out)

    return shared.finish(
        asked.out,
        ours.losses[0],
        ours.losses[-1],
        f"furthest apart       {apart(ours, theirs).max():.3e}",
        f"one weight moved     {apart(moved, theirs).max():.3e}",
        f"torch                {np.median(theirs.ms):.3f} ms a step",
        f"under enable()       {np.median(ours.ms):.3f} ms a step",
    )


if __name__ == "__main__":
    sys.exit(main())
