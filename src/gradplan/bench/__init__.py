"""`gradplan bench`: every kind against its floor and against what users would pick instead.

- `workloads` is the one table of named cases;
- `problems` builds their arrays on a device, `oracle` checks a result in float64;
- `peers` is what the others run, `clocks` times anything;
- `measure` does one row, `workers` keeps it in a process of its own;
- `results` is the JSON file; `markdown` (the README's table), `report` (one page), `plots` and
  `compare` (what moved) are made from it; `bandwidth` sets the floor where nothing is timed;
- `command` is the command line, `session` one run of it;
- `thresholds` says what decides the GPU's table, `tune` measures it again.

Nothing is timed before its result is right. torch makes the arrays, so it must be installed.
"""
