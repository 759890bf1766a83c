// Line charts with uPlot: one line a series, the mean over seeds, with a band from the lowest to the highest.
const charts = [];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000]; // no half iterations
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Several runs of one series as x, mean, low and high.
function overSeeds(runs) {
  const at = new Map();
  for (const { x, y } of runs) x.forEach((place, i) => y[i] !== null && y[i] !== undefined && (at.get(place) || at.set(place, []).get(place)).push(y[i]));
  const x = [...at.keys()].sort((a, b) => a - b);
  return {
    x,
    mean: x.map((place) => at.get(place).reduce((a, b) => a + b, 0) / at.get(place).length),
    low: x.map((place) => Math.min(...at.get(place))),
    high: x.map((place) => Math.max(...at.get(place))),
    spread: x.some((place) => at.get(place).length > 1),
  };
}

function chart(series, { height = 190, points = false, unit = "" } = {}) {
  const box = h("div", { className: "chart" });
  const found = series.map((one) => ({ ...one, ...overSeeds(one.runs) })).filter((one) => one.x.length);
  if (!found.length) return h("p", { className: "quiet" }, "No values yet.");
  const xs = [...new Set(found.flatMap((one) => one.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const spread = (one, values) => {
    const column = new Array(xs.length).fill(null);
    one.x.forEach((x, i) => (column[place.get(x)] = values[i]));
    return column;
  };
  const data = [xs];
  const lines = [{ label: "iteration" }];
  const bands = [];
  for (const one of found) {
    const few = points || one.x.length < 25;
    lines.push({
      label: plain(one.label),
      stroke: one.color,
      width: 2,
      dash: one.dash,
      spanGaps: true,
      points: { show: few, size: 6, fill: one.color },
      value: (_, value) => number(value),
    });
    data.push(spread(one, one.mean));
    if (one.spread) {
      const at = lines.length;
      for (const edge of ["high", "low"]) {
        lines.push({ label: edge, stroke: "transparent", spanGaps: true, points: { show: false }, class: "edge", value: () => "" });
        data.push(spread(one, one[edge]));
      }
      bands.push({ series: [at, at + 1], fill: one.color + "2e" });
    }
  }
  const axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 34 };
  const draw = () => {
    const width = Math.max(220, box.clientWidth);
    if (box.plot) return box.plot.setSize({ width, height });
    box.plot = new uPlot(
      {
        width,
        height,
        series: lines,
        bands,
        scales: { x: { time: false, range: xs.length < 2 ? [xs[0] - 1, xs[0] + 1] : undefined }, y: { range: roomy } },
        axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 52, values: (_, marks) => marks.map((mark) => compact(mark)) }],
        cursor: { points: { size: 7 } },
        legend: { live: true },
      },
      data,
      box,
    );
  };
  whenSeen(box, draw);
  charts.push(draw);
  return box;
}

// The range of an axis, with some room. It begins at 0 where nothing is below, so that a share of 0 is not in the middle;
// that of a constant reaches from 0 to beyond it.
function roomy(_, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return [Math.min(0, low * 1.1), Math.max(0, low * 1.1) || (low ? 0 : 1)];
  const [bottom, top] = uPlot.rangeNum(low, high, 0.08, true);
  return [low >= 0 ? Math.max(0, bottom) : bottom, high <= 0 && low < 0 ? Math.min(0, top) : top];
}

function compact(mark) {
  const size = Math.abs(mark);
  return size && (size < 1e-3 || size >= 1e5) ? mark.toExponential(1) : String(+mark.toPrecision(4));
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries)
    if (entry.isIntersecting) {
      watcher.unobserve(entry.target);
      entry.target.whenSeen();
    }
});

// Charts far down the page are drawn when they come into view.
function whenSeen(box, draw) {
  box.whenSeen = draw;
  watcher.observe(box);
}

addEventListener("resize", () => charts.forEach((draw) => draw()));

// The series of one metric: a line for each group of runs and, for metrics of agents, for each agent.
function seriesOf(family, table) {
  const found = [];
  const groups = runGroups();
  groups.forEach((group, g) => {
    const names = new Set(group.flatMap((run) => Object.keys(run[table].columns)).filter((name) => name === family || name.startsWith(family + "/")));
    for (const name of names) {
      const agent = name === family ? null : name.slice(family.length + 1);
      const runs = group.filter((run) => run[table].columns[name]).map((run) => ({ x: run[table].iterations, y: run[table].columns[name] }));
      const label = [agent, groups.length > 1 ? groupName(group) : null].filter(Boolean).join(" · ") || (groups.length > 1 ? groupName(group) : family);
      const color = agent && agents.includes(agent) ? agentColor(agent) : PALETTE[(agent ? found.length : g) % PALETTE.length];
      found.push({ label, color, runs, dash: agent && g ? [4 + 2 * g, 4] : undefined });
    }
  });
  return found;
}
