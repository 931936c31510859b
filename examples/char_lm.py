"""Train a small character-level language model whose gradients come from gradplan.

The model reads the last 16 characters and guesses the next one. It is written in plain NumPy:
matrix products and their gradients are NumPy's, and the gradients of the embedding, of the layer
norm's mean and variance, of log-softmax and of the mean loss are gradplan's. Every layer keeps
what its backward pass needs, and the two passes stand next to each other, so the file can be read
from top to bottom as an account of what a training step does.

    python examples/char_lm.py                        # half a minute on two cores, writes loss.png
    python examples/char_lm.py --quick --out quick.png

The text, examples/data/tides.txt, was written for this example.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import shared
from shared import BLUE, GREY, ORANGE, PALE, Adam, Array, Indices, Parameter

import gradplan as gp

TEXT = Path(__file__).resolve().parent / "data" / "tides.txt"
PROMPT = "In the morning the keeper went "


class Embedding:
    """y = table[indices]: a learned vector for every character."""

    def __init__(self, vocabulary: int, width: int, rng: np.random.Generator, dtype: Any) -> None:
        self.table = Parameter((0.3 * rng.standard_normal((vocabulary, width))).astype(dtype))
        self.parameters = [self.table]

    def forward(self, indices: Indices) -> Array:
        self.indices = indices
        return self.table.value[indices]

    def backward(self, dy: Array) -> None:
        # dtable[v] = Σ dy[n] over the places n where indices[n] == v. A common letter stands in
        # hundreds of places of one batch; gradplan adds them in a fixed order, so that the same
        # seed gives the same model. The gradient is written over the old one: no zeroing first.
        vocabulary = self.table.value.shape[0]
        gp.embedding_backward(dy, self.indices, vocabulary, out=self.table.grad)


class Forget:
    """Dropout of whole characters in training: the farther back one stands, the likelier.

    A text this small is soon learned by heart. What the next letter depends on is mostly near, so
    the near letters are kept and the far ones are made unreliable.
    """

    FARTHEST = 0.6

    def __init__(self, context: int, dtype: Any) -> None:
        self.chance = np.linspace(self.FARTHEST, 0, context, dtype=dtype)

    def forward(self, x: Array, rng: np.random.Generator | None) -> Array:
        self.scale: Array | None = None
        if rng is None:
            return x
        # What is kept grows by 1 / (1 − chance), so that the expected value stays x.
        kept = rng.random(x.shape[:2]) >= self.chance
        self.scale = (kept / (1 - self.chance))[:, :, None]
        return x * self.scale

    def backward(self, dy: Array) -> Array:
        return dy if self.scale is None else dy * self.scale


class Linear:
    """y = x W + b."""

    def __init__(self, n_in: int, n_out: int, rng: np.random.Generator, dtype: Any) -> None:
        scale = 1 / math.sqrt(n_in)
        self.weight = Parameter((scale * rng.standard_normal((n_in, n_out))).astype(dtype))
        self.bias = Parameter(np.zeros(n_out, dtype))
        self.parameters = [self.weight, self.bias]

    def forward(self, x: Array) -> Array:
        self.x = x
        return x @ self.weight.value + self.bias.value

    def backward(self, dy: Array) -> Array:
        # dW = xᵀ dy, db = Σ dy over the batch, dx = dy Wᵀ
        self.weight.grad = self.x.T @ dy
        self.bias.grad = dy.sum(axis=0)
        return dy @ self.weight.value.T


class LayerNorm:
    """y = gain · (x − mean) / √(var + ε) + bias, with the mean and variance of each row."""

    EPSILON = 1e-5

    def __init__(self, width: int, dtype: Any) -> None:
        self.gain = Parameter(np.ones(width, dtype))
        self.bias = Parameter(np.zeros(width, dtype))
        self.parameters = [self.gain, self.bias]

    def forward(self, x: Array) -> Array:
        self.x = x
        self.centred = x - x.mean(axis=-1, keepdims=True)
        self.rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + self.EPSILON)
        self.normed = self.centred * self.rstd
        y: Array = self.gain.value * self.normed + self.bias.value
        return y

    def backward(self, dy: Array) -> Array:
        self.gain.grad = (dy * self.normed).sum(axis=0)
        self.bias.grad = dy.sum(axis=0)
        dnormed = dy * self.gain.value

        # x reaches the output along three paths, and its gradient is their sum. First the direct
        # one, through the numerator: dcentred = dnormed · rstd.
        dcentred = dnormed * self.rstd
        # Then through the variance: rstd = (var + ε)^(−1/2), so dvar = −½ · rstd³ · drstd, and
        # gradplan takes it on to x: dx = dvar · 2 (x − mean) / n. Layer norm divides by n and not
        # by n − 1, hence correction=0.
        drstd = (dnormed * self.centred).sum(axis=-1, keepdims=True)
        dvar = -0.5 * self.rstd**3 * drstd
        through_var = gp.var_backward(dvar, self.x, axis=-1, keepdims=True, correction=0)
        # Last through the mean, which was taken from every element of its row: dx = dmean / n.
        dmean = -dcentred.sum(axis=-1, keepdims=True)
        through_mean = gp.mean_backward(dmean, self.x.shape, axis=-1, keepdims=True)

        dx: Array = dcentred + through_var + through_mean
        return dx


class ResidualBlock:
    """y = x + relu(norm(x)) W + b: a step that the layer adds to what it was given."""

    def __init__(self, width: int, rng: np.random.Generator, dtype: Any) -> None:
        self.norm = LayerNorm(width, dtype)
        self.linear = Linear(width, width, rng, dtype)
        self.parameters = self.norm.parameters + self.linear.parameters

    def forward(self, x: Array) -> Array:
        h = self.norm.forward(x)
        self.positive = h > 0
        return x + self.linear.forward(h * self.positive)

    def backward(self, dy: Array) -> Array:
        dh = self.linear.backward(dy) * self.positive
        return dy + self.norm.backward(dh)


class CrossEntropy:
    """loss = −mean of log_softmax(logits)[target]: the surprise at the true next character."""

    def forward(self, logits: Array, targets: Indices) -> float:
        self.targets = targets
        # The maximum is taken off first, so that exp cannot overflow.
        shifted = logits - logits.max(axis=-1, keepdims=True)
        self.log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        picked = np.take_along_axis(self.log_p, targets[:, None], axis=-1)
        return -float(picked.mean())

    def backward(self) -> Array:
        # loss = −mean(picked), so each picked log-probability gets dy / n with dy = −1.
        minus_one = np.array(-1, self.log_p.dtype)
        dpicked = gp.mean_backward(minus_one, (len(self.targets), 1))
        # Only the picked entries were used; the others have no gradient of their own.
        dlog_p = np.zeros_like(self.log_p)
        np.put_along_axis(dlog_p, self.targets[:, None], dpicked, axis=-1)
        # dlogits = dlog_p − exp(log_p) · Σ dlog_p: here (probability − one at the target) / n.
        dlogits: Array = gp.log_softmax_backward(dlog_p, self.log_p, axis=-1)
        return dlogits


class CharModel:
    """Embedding, one wide linear layer over the whole context, residual blocks, logits."""

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int = 16,
        embedding: int = 24,
        hidden: int = 192,
        blocks: int = 2,
        seed: int = 0,
        dtype: Any = np.float32,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.context = context
        self.embed = Embedding(vocabulary, embedding, rng, dtype)
        self.forget = Forget(context, dtype)
        self.mix = Linear(context * embedding, hidden, rng, dtype)
        self.blocks = [ResidualBlock(hidden, rng, dtype) for _ in range(blocks)]
        self.norm = LayerNorm(hidden, dtype)
        self.head = Linear(hidden, vocabulary, rng, dtype)
        # Small logits at the start: the untrained model guesses all characters alike, and the
        # first loss is ln(vocabulary).
        self.head.weight.value *= 0.1
        self.loss = CrossEntropy()

        layers: list[Embedding | Linear | ResidualBlock | LayerNorm]
        layers = [self.embed, self.mix, *self.blocks, self.norm, self.head]
        self.parameters: list[Parameter] = [p for layer in layers for p in layer.parameters]

    def logits(self, indices: Indices, rng: np.random.Generator | None = None) -> Array:
        h = self.forget.forward(self.embed.forward(indices), rng)
        h = self.mix.forward(h.reshape(len(indices), -1))
        for block in self.blocks:
            h = block.forward(h)
        return self.head.forward(self.norm.forward(h))

    def forward(
        self, indices: Indices, targets: Indices, rng: np.random.Generator | None = None
    ) -> float:
        """The loss; a generator means training, and draws what is forgotten."""
        return self.loss.forward(self.logits(indices, rng), targets)

    def backward(self) -> None:
        dh = self.norm.backward(self.head.backward(self.loss.backward()))
        for block in reversed(self.blocks):
            dh = block.backward(dh)
        dh = self.mix.backward(dh).reshape(*self.embed.indices.shape, -1)
        self.embed.backward(self.forget.backward(dh))


class Corpus:
    """The text as numbers, cut into windows of `context` characters and the one that follows."""

    # Every tenth block is kept back for validation, so that both parts come from the whole text.
    BLOCK = 400
    EVERY = 10

    def __init__(self, text: str, context: int) -> None:
        self.characters = sorted(set(text))
        self.code = {c: i for i, c in enumerate(self.characters)}
        self.context = context
        data = self.encode(text)
        kept_back = np.arange(len(data)) // self.BLOCK % self.EVERY == self.EVERY - 1
        windows = np.lib.stride_tricks.sliding_window_view(data, context + 1)
        kept = np.lib.stride_tricks.sliding_window_view(kept_back, context + 1)
        # A window that straddles a border belongs to neither part: the model never sees a
        # validation character in training, not even as context.
        self.train = windows[~kept.any(axis=1)]
        self.validation = windows[kept.all(axis=1)]

    def encode(self, text: str) -> Indices:
        return np.array([self.code[c] for c in text], np.int64)

    def decode(self, indices: Indices) -> str:
        return "".join(self.characters[i] for i in indices)


@dataclass
class History:
    """What the training run measured, in nats per character."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.train[0]

    @property
    def last(self) -> float:
        # One batch is noisy: the mean over the last twentieth of the run.
        return float(np.mean(self.train[-max(1, len(self.train) // 20) :]))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short linear warm-up, then half a cosine down to a hundredth of the peak."""
    warmup = min(50, max(1, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    along = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * along)))


def train(
    model: CharModel,
    corpus: Corpus,
    *,
    steps: int,
    batch: int,
    seed: int,
    rate: float = 3e-3,
    report: Callable[[float], None] = lambda loss: None,
) -> History:
    """Train for a number of steps and validate about twenty times on the way."""
    rng = np.random.default_rng(seed)
    adam = Adam(model.parameters, decay=1.0)
    history = History()

    def validate(step: int) -> None:
        windows = corpus.validation
        loss = model.forward(windows[:, :-1], windows[:, -1])
        history.validation.append((step, loss))

    for step in range(steps):
        if step % max(1, steps // 20) == 0:
            validate(step)
        windows = corpus.train[rng.integers(len(corpus.train), size=batch)]
        history.train.append(model.forward(windows[:, :-1], windows[:, -1], rng))
        model.backward()
        adam.step(learning_rate(step, steps, rate))
        report(history.train[-1])
    validate(steps)
    return history


def sample(
    model: CharModel,
    corpus: Corpus,
    *,
    length: int,
    seed: int,
    prompt: str = PROMPT,
    temperature: float = 0.6,
) -> str:
    """Continue the prompt, one character at a time."""
    rng = np.random.default_rng(seed)
    indices = corpus.encode(prompt)
    for _ in range(length):
        logits = model.logits(indices[None, -model.context :])[0]
        # The largest of logits + Gumbel noise is a draw from their softmax.
        draw = np.argmax(logits / temperature + rng.gumbel(size=logits.shape))
        indices = np.append(indices, draw)
    return corpus.decode(indices)


def smooth(values: list[float], reach: int = 25) -> list[float]:
    """Mean over the neighbours on both sides, fewer of them near the start.

    A running average of the past would trail behind the steep first steps.
    """
    averages = []
    for i in range(len(values)):
        side = min(reach, i)
        averages.append(float(np.mean(values[i - side : i + side + 1])))
    return averages


def draw(history: History, vocabulary: int, path: Path) -> None:
    """Save the loss curve as a picture."""
    uniform = math.log(vocabulary)
    steps = range(1, len(history.train) + 1)
    guess = f"uniform guess, ln {vocabulary}"
    with shared.picture(path, figsize=(8, 4.8)) as (_, axes):
        axes.axhline(uniform, color=GREY, linestyle="--", linewidth=1.2, label=guess)
        axes.plot(steps, history.train, color=PALE, linewidth=0.6, label="train, each batch")
        axes.plot(steps, smooth(history.train), color=BLUE, linewidth=2, label="train, smoothed")
        at, losses = zip(*history.validation, strict=True)
        axes.plot(at, losses, "o", color=ORANGE, markersize=5, label="validation")
        axes.set_xlabel("training step")
        axes.set_ylabel("loss (nats per character)")
        axes.set_title("Character model trained with gradplan's gradients")
        axes.set_xlim(0, len(history.train) * 1.01)
        axes.set_ylim(0, uniform * 1.1)
        axes.grid(axis="x", visible=False)
        axes.legend()


def main(argv: list[str] | None = None) -> int:
    """Train, report and draw; 0 if the loss fell."""
    about = "Train a small character model whose gradients come from gradplan."
    options = shared.Options(about, steps=2000, quick_steps=120, out="loss.png")
    options.add("--batch", type=shared.positive, default=128, help="windows a step (%(default)s)")
    asked = options.parse(argv)

    model_seed, batch_seed, sample_seed = np.random.SeedSequence(asked.seed).generate_state(3)
    context = 16
    corpus = Corpus(TEXT.read_text(encoding="ascii"), context)
    uniform = math.log(len(corpus.characters))
    model = CharModel(len(corpus.characters), context=context, seed=int(model_seed))

    count = sum(p.value.size for p in model.parameters)
    shared.console.print(
        f"{len(corpus.train)} training windows, {len(corpus.validation)} for validation, "
        f"{len(corpus.characters)} characters, {count} parameters"
    )
    with shared.progress(asked.steps) as report:
        history = train(
            model,
            corpus,
            steps=asked.steps,
            batch=asked.batch,
            seed=int(batch_seed),
            report=report,
        )

    draw(history, len(corpus.characters), asked.out)
    text = sample(model, corpus, length=240, seed=int(sample_seed))
    shared.console.print(f"\n{text}\n", markup=False)
    return shared.finish(
        asked.out,
        history.first,
        history.last,
        f"validation loss      {history.validation[-1][1]:.6f}",
        f"uniform guess        {uniform:.6f} nats per character",
    )


if __name__ == "__main__":
    sys.exit(main())
