"""PyTorch's own samples: results, gradients, second-order gradients, halves, layouts, errors."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from opinfo import COVERED, leaves, op_db, outputs  # noqa: E402

# In CI; `--complete` takes all of them.
SAMPLES = 12
# Jacobians of larger samples take long and show nothing new.
CHECKED_ELEMENTS = 150


def named(*elements):
    """Ids that send the tests of one kernel to one process."""
    return [
        pytest.param(key, element, id=f"{kind or 'torch'}-{element}-{key[0]}-{key[1]}")
        for key, (_, kind) in COVERED.items()
        for element in elements
    ]


def samples(op, dtype, complete, device="cpu"):
    found = op.sample_inputs(device, dtype, requires_grad=True)
    return found if complete else itertools.islice(found, SAMPLES)


@pytest.mark.parametrize(("key", "element"), named("f64"))
def test_results_and_gradients(key, element, complete, ran):
    op, (ours, kind) = op_db()[key], COVERED[key]
    for sample in samples(op, torch.float64, complete):
        for one in (sample, sample.noncontiguous()):
            args = (one.input, *one.args)
            expected, got = op(*args, **one.kwargs), ours(*args, **one.kwargs)
            if isinstance(expected, tuple):
                assert isinstance(got, tuple)
                assert len(got) == len(expected)
                assert getattr(got, "_fields", None) == getattr(expected, "_fields", None)
            for a, b in zip(outputs(expected), outputs(got), strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
                assert (a.dtype, a.stride(), a.requires_grad) == (
                    b.dtype,
                    b.stride(),
                    b.requires_grad,
                )
            dys = [torch.randn_like(a) for a in outputs(expected)]
            theirs = torch.autograd.grad(outputs(expected), leaves(args), dys, allow_unused=True)
            mine = torch.autograd.grad(outputs(got), leaves(args), dys, allow_unused=True)
            for a, b in zip(theirs, mine, strict=True):
                torch.testing.assert_close(b, a, equal_nan=True)
    if kind is not None:
        assert ran[kind]


@pytest.mark.parametrize(("key", "element"), named("f64"))
def test_gradcheck(key, element, complete):
    op, (ours, _) = op_db()[key], COVERED[key]
    for sample in samples(op, torch.float64, complete):
        args = (sample.input, *sample.args)
        inputs = leaves(args)
        sizes = [one.numel() for one in inputs]
        if sum(sizes) > CHECKED_ELEMENTS or 0 in sizes:  # gradcheck knows no empty ones
            continue

        def call(*inputs, args=args, sample=sample):
            given = iter(inputs)
            full = [
                next(given) if isinstance(one, torch.Tensor) and one.requires_grad else one
                for one in args
            ]
            return tuple(outputs(ours(*full, **sample.kwargs)))

        # At zero a norm has a subgradient, and its difference quotient does not know it.
        if key[1] != "subgradients_at_zero":
            fast = op.gradcheck_fast_mode is not False and not complete
            assert torch.autograd.gradcheck(call, inputs, fast_mode=fast, check_batched_grad=True)
            assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def gradients(function, args, kwargs, dys=None):
    args = [
        one.detach().clone().requires_grad_()
        if isinstance(one, torch.Tensor) and one.is_floating_point()
        else one
        for one in args
    ]
    made = outputs(function(*args, **kwargs))
    if dys is None:
        dys = [torch.randn_like(one) for one in made]
    dys = [dy.to(one.dtype) for dy, one in zip(dys, made, strict=True)]
    return torch.autograd.grad(made, leaves(args), dys, allow_unused=True), dys


@pytest.mark.parametrize(("key", "element"), named("bf16", "f16"))
def test_halves_are_no_less_accurate_than_torch(key, element, complete):
    """Against float64 on the same stored inputs: torch's own error, plus one rounding."""
    op, (ours, _) = op_db()[key], COVERED[key]
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[element]
    rounding = {"bf16": 2.0**-8, "f16": 2.0**-11}[element]
    if dtype not in op.dtypes:
        pytest.skip(f"torch has no {key[0]} for {dtype}")
    for sample in samples(op, dtype, complete):
        args = (sample.input, *sample.args)
        theirs, dys = gradients(op, args, sample.kwargs)
        mine, _ = gradients(ours, args, sample.kwargs, dys)
        wide = [
            one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
            for one in args
        ]
        wider = {
            name: torch.float64 if name == "dtype" else value
            for name, value in sample.kwargs.items()
        }
        exact, _ = gradients(op, wide, wider, dys)
        for a, b, true in zip(theirs, mine, exact, strict=True):
            if true is None:
                assert b is None or not b.any()
                continue
            finite = torch.isfinite(true)
            error = (b.double() - true)[finite].norm()
            theirs_error = (a.double() - true)[finite].norm()
            if torch.isfinite(theirs_error):
                assert error <= theirs_error + rounding * true[finite].norm()


@pytest.mark.parametrize("key", COVERED, ids="-".join)
def test_what_torch_refuses_is_refused(key):
    op, (ours, _) = op_db()[key], COVERED[key]
    if op.error_inputs_func is None:
        pytest.skip("torch lists no errors")
    for error in op.error_inputs("cpu"):
        sample = error.sample_input
        args = [
            one.detach().requires_grad_()
            if isinstance(one, torch.Tensor) and one.is_floating_point()
            else one
            for one in (sample.input, *sample.args)
        ]
        refused = refusal(op, args, sample.kwargs)
        assert refusal(ours, args, sample.kwargs) == refused


def refusal(function, args, kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:  # whatever it is: both must say the same
        return type(error), str(error)
    return None
