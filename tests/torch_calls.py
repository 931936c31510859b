"""Calls, arguments and models that the tests of `gradplan.torch` share."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import gradplan.torch as gt

# A call of each covered function on one tensor, in ours and in torch's own.
CALLS = {
    "softmax": lambda t, x: t.softmax(x, -1),
    "softmax_0": lambda t, x: t.softmax(x, 0),
    "log_softmax": lambda t, x: t.log_softmax(x, 1),
    "lerp": lambda t, x: t.lerp(x, x * x, 0.3),
    "cumsum": lambda t, x: t.cumsum(x, 0),
    "cumprod": lambda t, x: t.cumprod(x, 1),
    "cummax": lambda t, x: t.cummax(x, 1)[0],
    "cummin": lambda t, x: t.cummin(x, 0)[0],
    "logcumsumexp": lambda t, x: t.logcumsumexp(x, 1),
    "mean": lambda t, x: t.mean(x, 1),
    "amax": lambda t, x: t.amax(x, (0, 1), keepdim=True),
    "amin": lambda t, x: t.amin(x, 1),
    "max": lambda t, x: t.max(x),
    "min": lambda t, x: t.min(x),
    "prod": lambda t, x: t.prod(x, 1),
    "prod_all": lambda t, x: t.prod(x),
    "vector_norm": lambda t, x: t.linalg.vector_norm(x, dim=1),
    "norm": lambda t, x: t.norm(x),
    "logsumexp": lambda t, x: t.logsumexp(x, (0, 1)),
    "var": lambda t, x: t.var(x, 1, correction=0),
    "std": lambda t, x: t.std(x, 0),
    "var_mean": lambda t, x: torch.stack(tuple(t.var_mean(x, 1))),
    "std_mean": lambda t, x: torch.stack(tuple(t.std_mean(x, 1))),
}


def sample(*shape, dtype=torch.float64, seed=0, requires_grad=True):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_(requires_grad)


def gradient(call, x, seed=1, **options):
    y = call(x)
    (dx,) = torch.autograd.grad(y, x, sample(*y.shape, seed=seed, requires_grad=False).to(y.dtype))
    return dx


def operator_arguments(kind, device="cpu"):
    """Arguments of `torch.ops.gradplan` for one kind."""
    x = sample(3, 4).detach().to(device)
    small = sample(3).detach().to(device)
    known = {
        "softmax": (x, x.softmax(1), 1),
        "log_softmax": (x, x.log_softmax(1), 1),
        "lerp": (x, 0.3, True, False),
        "cumsum": (x, 0),
        "cumprod": (x, x, x.cumprod(1), 1),
        "cummax": (x, x, x.cummax(1)[0], 1),
        "cummin": (x, x, None, 1),
        "log_cumsum_exp": (x, x, x.logcumsumexp(1), 1),
        "mean": (small, [3, 4], [1], False),
        "max": (small, x, x.amax(1), [1], False),
        "min": (small, x, x.amin(1), [1], False),
        "prod": (small, x, None, [1], False),
        "norm2": (small, x, x.norm(dim=1), [1], False),
        "log_sum_exp": (small, x, x.logsumexp(1), [1], False),
        "var": (small, x, [1], False, 1.0),
        "std": (small, x, x.std(1), [1], False, 1.0),
        "embedding": (x, torch.tensor([1, 0, 5], device=device), 6, 0, True),
    }
    return known[kind]


def transposed(t):
    return t.mT.contiguous().mT if t.dim() == 2 else t.clone()


class Transformer(nn.Module):
    """One block, its attention written out."""

    def __init__(self, words=32, width=16):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, words))

    def forward(self, tokens):
        h = self.table(tokens)
        q, k, v = self.qkv(h).chunk(3, -1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        mask = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        h = h + scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        h = h / (h.var(-1, keepdim=True) + 1e-5).sqrt()
        scores = self.mlp(h[:, :-1]).log_softmax(-1)
        return F.nll_loss(scores.flatten(0, 1), tokens[:, 1:].flatten())


class Compositor(nn.Module):
    """Volume rendering: transmittance is a cumprod along the ray."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, rays):
        points, target = rays
        raw = self.field(points)
        alpha = 1 - torch.exp(-F.softplus(raw[..., 0]) * 0.1)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha], 1), 1)
        colour = ((through[:, :-1] * alpha).unsqueeze(-1) * raw[..., 1:].sigmoid()).sum(1)
        return (colour - target).square().mean()


def losses(model, data, steps, enabled):
    model = copy.deepcopy(model)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        optimiser.zero_grad()
        if enabled:
            with gt.enable():
                loss = model(data)
        else:
            loss = model(data)
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found
