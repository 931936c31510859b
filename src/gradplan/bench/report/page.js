"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const by = id => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";

  // Elements. Text from the results only ever becomes a text node.
  const make = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children.filter(child => child !== null));
    return node;
  };
  const draw = (name, attributes = {}, text = null) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  };
  const canvas = (width, height, label) =>
    draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });

  // Numbers, with three digits that mean something.
  const digits = value => (value >= 100 ? 0 : value >= 10 ? 1 : value >= 1 ? 2 : 3);
  const short = value => value.toFixed(digits(Math.abs(value)));
  const scaled = (value, units, step) => {
    let place = 0;
    while (value >= 0.9995 * step && place < units.length - 1) { value /= step; place++; }
    return `${short(value)} ${units[place]}`;
  };
  const time = ms => scaled(ms * 1e3, ["µs", "ms", "s"], 1e3);
  const rate = speed => scaled(speed / 1e6, ["MB/s", "GB/s", "TB/s"], 1e3);
  const size = bytes => scaled(bytes, ["B", "kB", "MB", "GB", "TB"], 1e3);
  const percent = share => `${Math.round(100 * share)} %`;
  const times = ratio => `${ratio >= 100 ? ratio.toFixed(0) : ratio >= 10 ? ratio.toFixed(1) : ratio.toFixed(2)} ×`;
  const median = values => {
    const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  };
  const power = extent => {
    const k = Math.round(Math.log2(extent));
    return extent >= 2 ** 17 && 2 ** k === extent
      ? "2" + [...String(k)].map(d => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]).join("") : String(extent);
  };
  const shape = row => row.shape.map(power).join(" × ");
  const axis = row => (row.axis === null || row.shape.length < 2 ? "" : `, axis ${row.axis}`);
  const words = name => name.replaceAll("_", " ");
  const peerTitle = name => data.peers[name] ?? name;
  const colour = row => `var(--${row.family})`;
  const unique = values => [...new Set(values)];

  const GOOD = 0.8;

  // What is shown now.
  const state = { run: 0, family: "", element: "", case: "", find: "", sort: "", down: false };
  const run = () => data.runs[state.run];
  const inOrder = (rows, key, order) => unique(rows.map(row => row[key]))
    .sort((a, b) => (order.indexOf(a) + 1 || 1e9) - (order.indexOf(b) + 1 || 1e9));
  const matches = row => {
    const text = [row.kind, row.family, row.element, row.case, row.layout, row.variant, row.shape.join("x")]
      .join(" ").toLowerCase();
    return ["family", "element", "case"].every(key => !state[key] || row[key] === state[key])
      && state.find.toLowerCase().split(/\s+/).every(word => text.includes(word));
  };
  const peersOf = rows => Object.keys(data.peers).concat(unique(rows.flatMap(row => Object.keys(row.peers))))
    .filter((name, k, all) => all.indexOf(name) === k && rows.some(row => row.peers[name]));

  // A remark beside the pointer, and for fingers on a touch.
  const tip = by("tip");
  const tell = (node, text) => {
    node.addEventListener("pointerenter", event => {
      tip.textContent = text;
      tip.hidden = false;
      const box = tip.getBoundingClientRect(), room = document.documentElement.clientWidth;
      tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room - box.width - 8))}px`;
      tip.style.top = `${event.clientY > innerHeight / 2 ? event.clientY - box.height - 12 : event.clientY + 18}px`;
    });
    node.addEventListener("pointerleave", () => { tip.hidden = true; });
  };
  const about = row => [
    `${row.kind} ${row.element}, ${row.case}`,
    `${shape(row)}${axis(row)}, ${row.layout}`,
    row.ms ? `${time(row.ms)}, ${percent(row.share)} of the floor (${time(row.floor_ms)})` : row.error,
    row.chain_ms ? `one after the other: ${time(row.chain_ms)}, ${percent(row.chain_share)}` : "",
    row.variant ?? "",
  ].filter(Boolean).join("\n");

  const tile = (value, title, more) =>
    make("div", { class: "tile" }, make("b", {}, value), make("span", {}, title), make("small", {}, more));

  function headline() {
    const found = run(), timed = found.rows.filter(row => row.share !== null);
    by("device").textContent = found.device.name;
    document.title = `gradplan on ${found.device.name}`;
    const tiles = [], failed = found.rows.filter(row => row.error).length;
    let lead = `${found.rows.length} problems`;
    if (timed.length) {
      const shares = timed.map(row => row.share), good = shares.filter(share => share >= GOOD).length;
      lead += `; half of them at ${percent(median(shares))} of the floor or more`;
      tiles.push(tile(percent(median(shares)), "of the floor, median", `${good} of ${shares.length} rows at 80 % or more`));
    }
    for (const one of found.speedups) {
      tiles.push(tile(times(one.mean), `the speed of ${peerTitle(one.peer)}`,
        `geometric mean of ${one.count} rows; least ${times(one.least)} (${one.worst})`));
    }
    if (found.speedups.length) {
      lead += "; " + found.speedups.map(one => `${times(one.mean)} over ${peerTitle(one.peer)}`).join(", ");
    }
    if (failed) lead += `; ${failed} failed`;
    by("lead").textContent = lead + ".";
    by("busy").hidden = !found.busy;
    tiles.push(tile(rate(found.copy_bandwidth), "copy bandwidth", "read and written; it sets the floor"));
    const costs = Object.values(found.host_us);
    if (costs.length) {
      const cost = key => short(median(costs.map(one => one[key])));
      tiles.push(tile(`${cost("bound")} µs`, "host cost of a bound launch",
        `median kind; plan.run ${cost("run")} µs, function ${cost("function")} µs`));
    }
    by("tiles").replaceChildren(...tiles);
  }

  const legend = entries => make("div", { class: "legend" }, ...entries.map(([text, tint, full]) => {
    const mark = make("i", full ? { class: "full" } : {});
    const entry = make("span", { style: `color:${tint}` }, mark, make("span", {}, text));
    return entry;
  }));
  const nothing = () => make("div", { class: "none" }, "No row matches the filters.");
  // Plots are drawn at the size they have, so that their text is as large as the page's.
  const room = () => Math.max(280, by("shares").clientWidth);
  const wide = () => room() > 620;

  // Dots by family: the types are lanes of their own, so that nothing hides behind another.
  function shares(rows) {
    const box = by("shares");
    rows = rows.filter(row => row.share !== null);
    if (!rows.length) return box.replaceChildren(nothing());
    const width = room(), left = wide() ? 190 : 112, right = 24, lane = 26;
    const families = inOrder(rows, "family", data.families);
    const lanes = families.flatMap(family => {
      const some = rows.filter(row => row.family === family);
      return unique(some.map(row => row.element)).sort().map((element, k) => ({
        family: k ? "" : family, element, rows: some.filter(row => row.element === element), first: !k,
      }));
    });
    const most = Math.max(1.1, Math.ceil(10 * Math.max(...rows.map(row => row.share)) + 0.3) / 10);
    const top = 26, height = top + lane * lanes.length + 8 * families.length + 26;
    const x = share => left + share / most * (width - left - right);
    const plot = canvas(width, height, "Share of the floor by family");
    const step = most > 2.4 ? 0.5 : wide() ? 0.1 : 0.25;
    for (let k = 0; k * step <= most + 1e-9; k++) {
      const share = k * step, bold = Math.abs(share - 1) < 1e-9;
      plot.append(draw("line", { class: bold ? "floor" : "grid", x1: x(share), x2: x(share), y1: top - 4, y2: height - 24 }));
      plot.append(draw("text", { x: x(share), y: height - 8, "text-anchor": "middle" }, percent(share)));
    }
    plot.append(draw("text", { x: x(1), y: 14, "text-anchor": "middle", class: "name" }, "floor"));
    let y = top + 4;
    for (const one of lanes) {
      if (one.first && one !== lanes[0]) y += 8;
      const middle = y + lane / 2;
      plot.append(draw("text", { x: 0, y: middle + 4, class: "name" }, one.family && words(one.family).replace("binary elementwise", wide() ? "binary elementwise" : "binary")));
      plot.append(draw("text", { x: left - 12, y: middle + 4, "text-anchor": "end" }, one.element));
      plot.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: middle, y2: middle }));
      one.rows.forEach((row, k) => {
        const dot = draw("circle", { class: "dot", cx: x(row.share), cy: middle + (k * 7 % 11 - 5), r: 4.5, fill: colour(row) });
        tell(dot, about(row));
        plot.append(dot);
      });
      const half = x(median(one.rows.map(row => row.share)));
      plot.append(draw("line", { class: "median", x1: half, x2: half, y1: middle - 11, y2: middle + 11, stroke: `var(--${one.rows[0].family})` }));
      y += lane;
    }
    box.replaceChildren(plot);
  }

  // Gradients by cases. One type at a time, the first unless one is chosen.
  function matrix(rows) {
    const box = by("matrix");
    const elements = unique(rows.map(row => row.element));
    const element = elements.includes("bf16") ? "bf16" : elements[0];
    rows = rows.filter(row => row.element === element);
    by("matrix-note").textContent = rows.length
      ? `${element}${elements.length > 1 ? "; choose another type above" : ""}. The stronger the blue, the nearer to the floor; there is a step at 80 %.`
      : "";
    if (!rows.length) return box.replaceChildren(nothing());
    // An embedding's cases are its own: a table of their own keeps both narrow.
    const apart = [row => row.family !== "embedding", row => row.family === "embedding"];
    box.replaceChildren(...apart.map(some => rows.filter(some)).filter(some => some.length).map(grid));
  }
  function grid(rows) {
    const cases = inOrder(rows, "case", data.cases);
    const where = name => rows.find(row => row.case === name);
    const head = make("tr", {}, make("th", { class: "first" }, "gradient"),
      ...cases.map(name => make("th", {}, words(name), make("small", {}, shape(where(name))), make("small", {}, axis(where(name)).slice(2)))));
    const body = make("tbody");
    for (const family of inOrder(rows, "family", data.families)) {
      body.append(make("tr", { class: "family" }, make("th", { colspan: cases.length + 1 }, make("span", {}, words(family)))));
      for (const kind of inOrder(rows.filter(row => row.family === family), "kind", data.kinds)) {
        const line = make("tr", {}, make("th", { class: "first" }, kind));
        for (const name of cases) {
          const row = rows.find(one => one.kind === kind && one.case === name);
          const cell = make("td", {}, !row ? "" : row.share === null ? "–" : percent(row.share));
          if (row) tell(cell, about(row));
          if (row && row.share !== null) {
            const depth = Math.min(1, Math.max(0, row.share));
            // A step at 80 %: there is no tint on which neither dark nor white text reads well.
            const tint = depth < GOOD ? 6 + 42 * depth / GOOD : 74 + 22 * (depth - GOOD) / (1 - GOOD);
            cell.style.background = `color-mix(in srgb, var(--heat) ${Math.round(tint)}%, var(--card))`;
            cell.classList.toggle("deep", depth >= GOOD);
          }
          line.append(cell);
        }
        body.append(line);
      }
    }
    return make("div", { class: "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), body));
  }

  // One panel for each case and type that any peer ran.
  function races(rows) {
    const box = by("speedups"), peers = peersOf(run().rows);
    const raced = rows.filter(row => peers.some(name => row.peers[name]?.speedup));
    by("races").hidden = !peers.length;
    if (!raced.length) return box.replaceChildren(nothing());
    const ratios = raced.flatMap(row => peers.map(name => row.peers[name]?.speedup).filter(Boolean));
    const low = Math.min(0.8, ...ratios) * 0.9, high = Math.max(2, ...ratios) * 1.15;
    const groups = inOrder(raced, "case", data.cases).flatMap(name =>
      unique(raced.filter(row => row.case === name).map(row => `${row.element}\n${name}`)));
    const tint = name => `var(--peer${peers.indexOf(name) % 4})`;
    const panels = groups.map(group => {
      const [element, name] = group.split("\n");
      const some = raced.filter(row => row.element === element && row.case === name)
        .sort((a, b) => data.kinds.indexOf(a.kind) - data.kinds.indexOf(b.kind));
      const column = wide() ? 58 : 50, width = wide() ? (room() - 32) / 2 : room(), left = 116, right = column * peers.length + 4, lane = 22, top = 24;
      const height = top + lane * some.length + 24;
      const x = ratio => left + Math.log(ratio / low) / Math.log(high / low) * (width - left - right - 10);
      const plot = canvas(width, height, `Speed-up, ${element}, ${name}`);
      const marks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].filter(mark => mark >= low && mark <= high);
      let last = -1e9;
      for (const mark of marks) {
        plot.append(draw("line", { class: mark === 1 ? "floor" : "grid", x1: x(mark), x2: x(mark), y1: top - 4, y2: height - 22 }));
        if (mark === 1 || (x(mark) - last > 32 && Math.abs(x(mark) - x(1)) > 32)) {
          plot.append(draw("text", { x: x(mark), y: height - 7, "text-anchor": "middle" }, `${mark}×`));
          last = x(mark);
        }
      }
      peers.forEach((peer, k) => plot.append(draw("text", {
        x: width - right + column * (k + 1), y: 12, "text-anchor": "end", style: `fill:${tint(peer)};font-weight:600`,
      }, peerTitle(peer).replace("PyTorch eager", "PyTorch").replace("torch.compile", "compile"))));
      some.forEach((row, line) => {
        const y = top + lane * line + lane / 2;
        plot.append(draw("text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "name" }, row.kind));
        const known = peers.filter(peer => row.peers[peer]?.speedup);
        const view = data.views.includes(row.kind);
        const reach = known.map(peer => x(row.peers[peer].speedup)).concat(x(1));
        plot.append(draw("line", { class: "span", x1: Math.min(...reach), x2: Math.max(...reach), y1: y, y2: y }));
        for (const peer of peers) {
          const one = row.peers[peer];
          if (!one) continue;
          if (one.speedup) {
            const dot = draw("circle", { class: view ? "ring" : "dot", cx: x(one.speedup), cy: y, r: 5, [view ? "stroke" : "fill"]: tint(peer) });
            tell(dot, `${row.kind} ${row.element}, ${row.case}\n${peerTitle(peer)} ${time(one.ms)}, ours ${time(row.ms)}: ${times(one.speedup)}${view ? "\na view in torch: no race" : ""}${one.note ? "\n" + one.note : ""}`);
            plot.append(dot);
          }
          const label = draw("text", {
            x: width - right + column * (peers.indexOf(peer) + 1), y: y + 4, "text-anchor": "end",
            style: one.speedup && one.speedup < 1 ? "fill:var(--bad);font-weight:600" : "fill:var(--ink)",
          }, one.speedup ? times(one.speedup) : "–");
          if (!one.speedup && one.note) tell(label, `${peerTitle(peer)}: ${one.note}`);
          plot.append(label);
        }
      });
      return make("div", { class: "panel" },
        make("h3", {}, `${element}, ${words(name)}: ${shape(some[0])}${axis(some[0])}`), plot);
    });
    box.style.gridTemplateColumns = wide() ? "1fr 1fr" : "1fr";
    box.replaceChildren(...panels);
  }

  // Time against bytes.
  function roofline(rows) {
    const box = by("roofline"), peers = peersOf(run().rows);
    rows = rows.filter(row => row.ms && row.floor_bytes);
    if (!rows.length) return box.replaceChildren(nothing());
    const width = room(), height = wide() ? 460 : 380;
    const left = 62, right = 16, top = 14, bottom = 44, speed = run().copy_bandwidth;
    const points = rows.flatMap(row => [
      ...peers.filter(name => row.peers[name]?.ms).map(name => ({ row, name, ms: row.peers[name].ms })),
      { row, name: null, ms: row.ms },
    ]);
    const bytes = rows.map(row => row.floor_bytes), all = points.map(point => point.ms).concat(bytes.map(b => 1e3 * b / speed));
    const range = values => [Math.min(...values) / 1.35, Math.max(...values) * 1.35];
    let [b0, b1] = range(bytes);
    if (b1 / b0 < 8) { const mid = Math.sqrt(b0 * b1); b0 = mid / 3; b1 = mid * 3; }
    const [t0, t1] = range(all);
    const x = b => left + Math.log(b / b0) / Math.log(b1 / b0) * (width - left - right);
    const y = ms => height - bottom - Math.log(ms / t0) / Math.log(t1 / t0) * (height - top - bottom);
    const plot = canvas(width, height, "Time against bytes, with the floor");
    const ticks = (low, high, room) => {
      const decades = Math.log10(high / low), steps = decades < 2.2 ? (room > 700 ? [1, 2, 5] : [1, 3]) : [1];
      const made = [];
      for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k++) {
        for (const step of steps) { const value = step * 10 ** k; if (value >= low && value <= high) made.push(value); }
      }
      return made;
    };
    for (const b of ticks(b0, b1, width)) {
      plot.append(draw("line", { class: "grid", x1: x(b), x2: x(b), y1: top, y2: height - bottom }));
      plot.append(draw("text", { x: Math.min(x(b), width - 22), y: height - bottom + 18, "text-anchor": "middle" }, plainUnit(size(b))));
    }
    for (const ms of ticks(t0, t1, height)) {
      plot.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(ms), y2: y(ms) }));
      plot.append(draw("text", { x: left - 8, y: y(ms) + 4, "text-anchor": "end" }, plainUnit(time(ms))));
    }
    plot.append(draw("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "fewest bytes the gradient must move"));
    const ends = [Math.max(b0, t0 * speed / 1e3), Math.min(b1, t1 * speed / 1e3)];
    plot.append(draw("line", { class: "floor", x1: x(ends[0]), x2: x(ends[1]), y1: y(1e3 * ends[0] / speed), y2: y(1e3 * ends[1] / speed) }));
    const slope = Math.atan2(y(1e3 * ends[1] / speed) - y(1e3 * ends[0] / speed), x(ends[1]) - x(ends[0])) * 180 / Math.PI;
    const at = b0 * (b1 / b0) ** 0.97, ax = x(Math.min(at, ends[1])), ay = y(1e3 * Math.min(at, ends[1]) / speed);
    plot.append(draw("text", { x: ax, y: ay + 17, "text-anchor": "end", class: "name", transform: `rotate(${slope.toFixed(1)} ${ax} ${ay})` }, `floor, ${rate(speed)}`));
    for (const { row, name, ms } of points) {
      const dot = draw("circle", {
        class: name ? "ring" : "dot", cx: x(row.floor_bytes), cy: y(ms), r: name ? 4 : 5,
        [name ? "stroke" : "fill"]: name ? `var(--peer${peers.indexOf(name) % 4})` : colour(row),
      });
      tell(dot, name ? `${peerTitle(name)}: ${row.kind} ${row.element}, ${row.case}\n${time(ms)}; ours ${time(row.ms)}` : about(row));
      plot.append(dot);
    }
    const shown = peers.filter(name => points.some(point => point.name === name));
    box.replaceChildren(legend([
      ...inOrder(rows, "family", data.families).map(family => [words(family), `var(--${family})`, true]),
      ...shown.map(name => [peerTitle(name), `var(--peer${peers.indexOf(name) % 4})`, false]),
    ]), plot);
  }
  const plainUnit = text => text.replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ");

  // The table: [heading, value to sort by, cell, is it text?]
  function columns() {
    const made = [
      ["gradient", row => data.kinds.indexOf(row.kind), row => row.kind, true],
      ["type", row => row.element, row => row.element, true],
      ["case", row => row.case, row => words(row.case), true],
      ["shape", row => row.shape.reduce((a, b) => a * b, 1), row => shape(row) + axis(row), true],
      ["share", row => row.share, row => row.share === null ? "–" : bar(row.share), false],
      ["time", row => row.ms, row => row.ms ? time(row.ms) : make("span", { class: "bad" }, row.error ?? "–"), false],
      ["floor", row => row.floor_ms, row => row.floor_ms ? time(row.floor_ms) : "–", false],
      ["bytes", row => row.floor_bytes, row => row.floor_bytes ? size(row.floor_bytes) : "–", false],
      ["variant", row => row.variant, row => row.variant ?? "–", true],
      ["layout", row => row.layout, row => row.layout, true],
      ["family", row => row.family, row => words(row.family), true],
    ];
    if (run().rows.some(row => row.chain_share)) {
      made.splice(6, 0, ["one after the other", row => row.chain_share ?? null,
        row => row.chain_share ? `${percent(row.chain_share)}, ${time(row.chain_ms)}` : "–", false]);
    }
    peersOf(run().rows).forEach((name, k) => {
      const peer = row => row.peers[name];
      made.splice(6 + k, 0, [
        `over ${peerTitle(name)}`, row => peer(row)?.speedup ?? null, row => {
          const one = peer(row);
          if (!one) return "";
          const cell = make("span", { class: one.speedup ? (one.speedup < 1 ? "bad" : "good") : "" }, one.speedup ? times(one.speedup) : "–");
          if (one.ms) tell(cell, `${peerTitle(name)}: ${time(one.ms)}${one.note ? "\n" + one.note : ""}`);
          else if (one.note) tell(cell, one.note);
          return cell;
        }, false,
      ]);
    });
    return made;
  }
  const bar = share => {
    const fill = make("i");
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    return make("span", {}, percent(share), make("span", { class: "bar" }, fill));
  };
  function table(rows) {
    const all = columns(), chosen = all.find(([heading]) => heading === state.sort);
    if (chosen) {
      const [, value] = chosen;
      rows = [...rows].sort((one, other) => {
        const a = value(one), b = value(other);
        if (a === null || b === null) return (a === null) - (b === null);  // what is missing stays below
        const order = typeof a === "string" ? a.localeCompare(b) : a - b;
        return state.down ? -order : order;
      });
    }
    const head = make("tr", {}, ...all.map(([heading, , , text], k) => {
      const button = make("button", { type: "button" }, heading);
      button.addEventListener("click", () => {
        state.down = state.sort === heading ? !state.down : !text;
        state.sort = heading;
        show();
        by("table").querySelectorAll("thead button")[k].focus({ preventScroll: true });
      });
      const cell = make("th", { class: `${text ? "text" : ""}${k ? "" : " first"}`, scope: "col" }, button);
      if (heading === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      return cell;
    }));
    const body = make("tbody", {}, ...rows.map(row => make("tr", {}, ...all.map(([, , cell, text], k) =>
      make(k ? "td" : "th", { class: `${text ? "text" : ""}${k ? "" : " first"}` }, cell(row))))));
    const place = by("table"), at = place.scrollLeft;
    place.replaceChildren(make("table", {}, make("thead", {}, head), body));
    place.scrollLeft = at;
  }

  function machine() {
    const found = run(), device = found.device;
    const facts = [
      ["device", device.name], ["architecture", device.arch], ["driver", device.driver],
      ["memory", device.memory && size(device.memory)], ["threads", device.threads],
      ["copy bandwidth", rate(found.copy_bandwidth)],
      ["measured", found.date && found.date.replace("T", " ").replace("+00:00", " UTC")],
      ["gradplan", found.gradplan], ...Object.entries(found.versions),
    ].filter(([, value]) => value !== null && value !== undefined);
    by("machine").replaceChildren(make("table", {}, make("tbody", {}, ...facts.map(([name, value]) =>
      make("tr", {}, make("th", { class: "text" }, name), make("td", { class: "text" }, String(value)))))));
    const costs = Object.entries(found.host_us);
    if (!costs.length) return by("host").replaceChildren();
    const keys = ["bound", "run", "function"];
    by("host").replaceChildren(make("h3", {}, "Host cost of a call on 8 × 8, µs"), make("table", {},
      make("thead", {}, make("tr", {}, make("th", { class: "text" }, "gradient"), ...keys.map(key => make("th", {}, key)))),
      make("tbody", {}, ...costs.map(([kind, cost]) => make("tr", {}, make("td", { class: "text" }, kind),
        ...keys.map(key => make("td", {}, cost[key].toFixed(1))))))));
  }

  function choices() {
    const rows = run().rows;
    const fill = (id, values, every) => {
      const node = by(id);
      node.replaceChildren(make("option", { value: "" }, every), ...values.map(value => make("option", { value }, words(value))));
      node.value = values.includes(state[id]) ? state[id] : "";
      state[id] = node.value;
    };
    fill("family", inOrder(rows, "family", data.families), "all");
    fill("element", unique(rows.map(row => row.element)).sort(), "all");
    fill("case", inOrder(rows, "case", data.cases), "all");
  }

  function show() {
    const rows = run().rows.filter(matches);
    by("count").textContent = `${rows.length} of ${run().rows.length} rows`;
    shares(rows); matrix(rows); races(rows); roofline(rows); table(rows);
  }
  function whole() { headline(); choices(); machine(); show(); }

  // Light or dark: what the system asks for, until the reader chooses.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let own = null;
  const paint = () => {
    const theme = own ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    by("theme").textContent = theme === "dark" ? "Light" : "Dark";
  };
  by("theme").addEventListener("click", () => {
    own = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    paint();
  });
  dark.addEventListener("change", paint);
  paint();

  for (const id of ["family", "element", "case"]) {
    by(id).addEventListener("change", event => { state[id] = event.target.value; show(); });
  }
  by("find").addEventListener("input", event => { state.find = event.target.value; show(); });
  // In the order of the registry and of the named cases, whatever the file's own.
  for (const one of data.runs) {
    const place = row => [data.cases.indexOf(row.case) + 1 || 1e9, data.kinds.indexOf(row.kind)];
    one.rows.sort((a, b) => place(a)[0] - place(b)[0] || place(a)[1] - place(b)[1]);
  }
  data.runs.forEach((one, k) => by("run").append(make("option", { value: k }, `${one.device.name}, ${(one.date ?? "").slice(0, 10)}`)));
  by("pick").hidden = data.runs.length < 2;
  by("run").addEventListener("change", event => { state.run = Number(event.target.value); whole(); });
  let drawn = 0, waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => { if (room() !== drawn) { drawn = room(); show(); } });
  });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  drawn = room();
  whole();
})();
