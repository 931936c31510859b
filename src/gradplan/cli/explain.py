"""`gradplan explain`: what a plan would run, why, and how fast it could be at best."""

from __future__ import annotations

import argparse
import re
from typing import Any

from rich.table import Table
from rich.text import Text

from ..backends import ARCHITECTURES
from ..backends.gpu.launch import missing
from ..bench.bandwidth import Bandwidth, measured, recorded
from ..bench.problems import FAMILIES as PLANS
from ..bench.workloads import LAYOUTS, strides_of
from ..errors import InvalidProblem, Unsupported
from ..explanation import Explanation
from ..kinds import ElementKind, IndexKind, OpCategory, TieRule
from ..registry import KINDS, KindSpec
from ..sku import PlanPreference
from ..terminal import (
    ELEMENT_NAMES,
    KIND_NAMES,
    add_command,
    bytes_text,
    console,
    positive,
    print_json,
    rate_text,
    seconds_text,
    shape_of,
)

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add `explain` to the commands."""
    parser = add_command(
        commands,
        "explain",
        _explain,
        help="show which kernel a problem gets, and why",
        description="The kernel that a plan selects, why it and no other, the bytes it moves "
        "against the fewest possible, the least time these take on the device, the workspace and "
        "the guarantee. For a GPU that is not here, name its architecture.",
        examples=[
            "gradplan explain softmax --shape 8192x8192 --axis 0 --dtype bf16 --device cuda",
            "gradplan explain cummax --shape 64x1048576 --ties last --without y --arch sm_90",
            "gradplan explain embedding --shape 50304x768 --num-indices 262144 --arch sm_80",
        ],
    )
    # Several axes may begin with a minus: argparse knows one negative number only.
    parser._negative_number_matcher = re.compile(r"-\d+(,-?\d+)*$|-\d*\.\d+$")
    parser.add_argument("kind", choices=KIND_NAMES, metavar="KIND", help="see gradplan list")
    parser.add_argument(
        "--shape", type=shape_of, required=True, help="8192x8192; of an embedding, its table"
    )
    parser.add_argument(
        "--axis", type=_axes, default=(-1,), help="-1, or several for a reduction: 0,2"
    )
    parser.add_argument(
        "--dtype", "--element", dest="element", choices=ELEMENT_NAMES, default="f32"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="a GPU that need not be here")
    parser.add_argument(
        "--processors", type=positive, metavar="N", help="its multiprocessors (default: 132)"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="how all arrays lie")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="ARRAY", help="optional arrays not given: y"
    )
    options = parser.add_argument_group("options of kinds")
    options.add_argument("--reverse", action="store_true", help="scans: from the other end")
    options.add_argument(
        "--ties", choices=[rule.value for rule in TieRule], help="max, min, cummax, cummin"
    )
    options.add_argument("--correction", type=float, default=1.0, help="var, std (default: 1)")
    options.add_argument("--param", type=float, default=0.5, help="lerp's weight (default: 0.5)")
    options.add_argument("--num-indices", type=positive, metavar="N", help="embedding: how many")
    options.add_argument(
        "--index", choices=[kind.value for kind in IndexKind], default="i64", help="embedding"
    )
    options.add_argument("--padding-idx", type=int, metavar="ROW", help="embedding: skipped")
    options.add_argument(
        "--overwrite", action="store_true", help="embedding: not added to what is there"
    )
    options.add_argument("--scale-grad-by-freq", action="store_true", help="embedding")
    preference = parser.add_argument_group("preferences")
    preference.add_argument("--any-order", action="store_true", help="need not be deterministic")
    preference.add_argument("--max-workspace", type=int, metavar="BYTES", help="at most so much")
    preference.add_argument("--backend", help="numba, triton or reference")
    parser.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of copies, where it is known already"
    )
    parser.add_argument("--json", action="store_true", help="write JSON in place of a table")


def _axes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected -1 or 0,2, got {text!r}") from None


def _explain(options: argparse.Namespace) -> int:
    spec = next(spec for spec in KINDS.values() if spec.kind.value == options.kind)
    device = options.device
    if options.arch:
        processors = f":{options.processors}" if options.processors else ""
        device = options.arch + processors
    elif options.processors:
        raise InvalidProblem("--processors says more about an --arch: name it")
    desc = _descriptor(spec, options)
    preference = PlanPreference(
        deterministic=not options.any_order,
        max_workspace_bytes=options.max_workspace,
        backend=options.backend,
    )
    try:
        plan = PLANS[spec.category][0].select(desc, device=device, preference=preference)
    except Unsupported as error:
        if device.startswith("cuda") and missing() is not None:
            hint = "a GPU that is not here can be named: --arch sm_90"
            raise Unsupported(f"{error}; {hint}") from None
        raise
    known = [operand.name for operand in desc.operands]
    for name in options.without:
        if name not in known:
            raise InvalidProblem(f"--without {name}: {options.kind} has {', '.join(known)}")
    strides = strides_of(desc, options.layout, options.without)
    arrays = f"{options.layout} arrays"
    if options.without:
        arrays += f" without {', '.join(options.without)}"
    told = plan.explanation(strides, arrays)
    speed = _bandwidth(options, device)
    if options.json:
        found = {"device": plan.device, "shape": list(options.shape), **told.plain()}
        found["bandwidth"] = None if speed is None else speed.bytes_per_s
        found["bandwidth_from"] = None if speed is None else speed.source
        found["floor_s"] = None if speed is None else told.floor_s(speed.bytes_per_s)
        print_json(found)
    else:
        _show(options, told, speed)
    return 0


def _descriptor(spec: KindSpec, options: argparse.Namespace) -> Any:
    """The question, in the words of its family."""
    element = ElementKind.coerce(options.element)
    kind, shape, axes = spec.kind, options.shape, options.axis
    descriptor: Any = PLANS[spec.category][0]._descriptor_type
    if spec.category is OpCategory.EMBEDDING:
        if len(shape) != 2 or options.num_indices is None:
            raise InvalidProblem(
                "an embedding takes --shape ROWSxCOLUMNS of its table, and --num-indices"
            )
        return descriptor(
            num_embeddings=shape[0],
            embedding_dim=shape[1],
            num_indices=options.num_indices,
            element=element,
            index=options.index,
            padding_idx=options.padding_idx,
            accumulate=not options.overwrite,
            scale_grad_by_freq=options.scale_grad_by_freq,
        )
    if spec.category is OpCategory.BINARY_ELEMENTWISE:
        return descriptor(kind=kind, shape=shape, element=element, param=options.param)
    given: dict[str, Any] = {"kind": kind, "input_shape": shape, "element": element}
    if options.ties and spec.ties:
        given["ties"] = options.ties
    elif options.ties:
        raise InvalidProblem(f"--ties: {kind.value} has none")
    if spec.category is OpCategory.REDUCTION:
        return descriptor(**given, reduce_axis=axes, correction=options.correction)
    if len(axes) != 1:
        raise InvalidProblem(f"--axis: {kind.value} runs along one axis, got {len(axes)}")
    if spec.category is OpCategory.SCAN:
        return descriptor(**given, scan_axis=axes[0], reverse=options.reverse)
    return descriptor(**given, softmax_axis=axes[0])


def _bandwidth(options: argparse.Namespace, device: str) -> Bandwidth | None:
    if options.bandwidth is not None:
        if not options.bandwidth > 0:
            raise InvalidProblem(f"--bandwidth must be above 0, got {options.bandwidth:g}")
        return Bandwidth(1e9 * options.bandwidth, "as given")
    arch = options.arch or (device.partition(":")[0] if device.startswith("sm_") else None)
    return recorded(arch) if arch else measured(device)


def _show(options: argparse.Namespace, told: Explanation, speed: Bandwidth | None) -> None:
    sku = told.sku
    shape = " × ".join(map(str, options.shape))
    shown = console()
    title = Text.assemble((f"{sku.op} backward", "bold"), f" of {shape}, {sku.element.value}, ")
    shown.print(title + Text(told.arrays), Text(told.formula, "dim"), sep="\n")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("kernel", Text(str(sku)))
    table.add_row("engine", Text(told.engine))
    table.add_row("variant", Text(f"{sku.layout}, {sku.variant}: {told.why}"))
    for k, other in enumerate(told.others):
        line = Text.assemble((other.variant, "yellow"), f": {other.why}")
        table.add_row("" if k else "and not", line)
    over = told.moved / told.fewest if told.fewest else 1.0
    table.add_row(
        "bytes",
        Text(
            f"{bytes_text(told.read)} read, {bytes_text(told.written)} written; fewest possible "
            f"{bytes_text(told.fewest_read)} and {bytes_text(told.fewest_written)}: "
            f"{over:.2f} × the least"
        ),
    )
    table.add_row("floor", _floor(told, speed))
    table.add_row(
        "workspace",
        Text(f"{bytes_text(told.workspace)} (any layout: {bytes_text(told.workspace_bound)})"),
    )
    table.add_row("guarantee", Text(told.promise()))
    shown.print(table)


def _floor(told: Explanation, speed: Bandwidth | None) -> Text:
    if speed is None:
        return Text("not known: no bandwidth is recorded for it; give --bandwidth", "yellow")
    least = seconds_text(told.floor_s(speed.bytes_per_s))
    moved = seconds_text(told.moved / speed.bytes_per_s)
    more = "" if told.moved == told.fewest else f"; {moved} for the bytes it moves"
    return Text(f"{least} at {rate_text(speed.bytes_per_s)} ({speed.source}){more}")
