"""What `test_beside_other_processes` runs in several processes at once: launches that keep much on
the chip, over and over, and whether each had the bits of the first.

Many launches are waiting all the time: a process that has none lets go of the GPU by itself, and is
not interrupted.
"""

from __future__ import annotations

import sys
import time

import torch

from covering import small_parts
from gradplan import PlanPreference, cases
from gradplan.backends.gpu import launch, table
from gradplan.kinds import ElementKind
from gradplan.registry import KINDS
from jobs import to_numpy, to_torch

_AT_ONCE = 50


class Repeated:
    """A problem whose launch is repeated."""

    def __init__(self, case, thresholds):
        self.case = case
        problem = cases.Problem(case)
        tensors = {name: to_torch(array, "cuda") for name, array in problem.arrays.items()}
        names = [one.name for one in case.desc.operands if one.output and one.name in tensors]
        with table.using(launch.device_arch(0), thresholds):
            plan = problem.plan("cuda", PlanPreference(backend="triton"))
            self._launch = plan.bind(type(problem.args())(**tensors))
        self._launch()
        for name in names:
            array = problem.arrays[name]
            array[...] = to_numpy(tensors[name], array.dtype)
        outcome = problem.outcome(plan.precision_guarantee.relative_error)
        assert outcome.ok, outcome
        self._outputs = [tensors[name].view(torch.uint8) for name in names]
        self._first = [one.clone() for one in self._outputs]
        self._others = torch.zeros((), dtype=torch.int64, device="cuda")
        self.runs = 0

    def run(self):
        for _ in range(_AT_ONCE):
            for one in self._outputs:
                one.fill_(255)
            self._launch()
            for one, first in zip(self._outputs, self._first, strict=True):
                self._others += (one != first).any()
        self.runs += _AT_ONCE

    def others(self):
        """How often the bits were others."""
        return int(self._others)


def some():
    """A case of each way to keep parts on the chip, and its thresholds."""
    for spec in KINDS.values():
        for cut, thresholds in small_parts(spec):
            met = set()
            for case, program in cut(spec, ElementKind.BF16):
                way = (program.variant, program.steps[-1].kernel)
                if way not in met:
                    met.add(way)
                    yield case, thresholds


def main(seconds):
    repeated = [Repeated(*one) for one in some()]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in repeated:
            one.run()
        torch.cuda.synchronize()
    wrong = [one for one in repeated if one.others()]
    for one in wrong:
        print(f"{one.others()} of {one.runs} launches had other bits: {one.case}")
    print(f"{len(repeated)} cases, {sum(one.runs for one in repeated)} launches")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
