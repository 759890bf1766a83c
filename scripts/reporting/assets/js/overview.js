// The first page: the score, the findings, and who learnt when.
function held(run) {
  const name = Object.keys(run.evaluations.columns).find((column) => /^eval\/avg@\d+$/.test(column)) || "eval/greedy";
  const values = (run.evaluations.columns[name] || []).map((value, i) => [run.evaluations.iterations[i], value]).filter((pair) => pair[1] !== null);
  const first = values[0];
  const last = values[values.length - 1];
  return { name, first: first && first[1], last: last && last[1], points: values.length };
}

function tile(label, value, note) {
  return h("div", { className: "tile" }, h("div", { className: "label" }, label), h("div", { className: "value" }, value), h("div", { className: "quiet" }, note || ""));
}

function tiles(run) {
  const score = held(run);
  const done = run.metrics.iterations[run.metrics.iterations.length - 1] || 0;
  const planned = run.settings.iterations;
  const change = score.points > 1 ? `${signed(score.last - score.first)} since the start` : score.points ? "one evaluation so far" : "not evaluated yet";
  const box = h("div", { className: "tiles" });
  if (meta.runs.length > 1) box.append(h("div", { className: "tile name" }, h("div", { className: "label" }, "run"), h("div", { className: "value small" }, safe(run.name)), h("div", { className: "quiet" }, run.seed === null ? "" : `seed ${run.seed}`)));
  box.append(
    tile("evaluation score", score.points > 1 ? `${number(score.first)} → ${number(score.last)}` : number(score.last), change),
    tile("iterations", planned ? `${done} of ${planned}` : String(done), run.seconds ? `${Math.round(run.seconds / 60) ? (run.seconds / 60).toFixed(1) + " min" : run.seconds.toFixed(0) + " s"} of training` : ""),
    tile("agents", String(run.agents.length), plain(run.agents.join(", "))),
    tile("learns by", plain(run.settings.algorithm || "–"), run.settings.coach && run.settings.coach !== "none" ? `coach: ${plain(run.settings.coach)}` : "no coach"),
    tile("base", plain(String(run.base || run.settings.model_name_or_path || "–").split("/").pop()), plain(run.environment || run.command || "")),
  );
  return box;
}

function findingsCard() {
  const rows = [];
  for (const run of meta.runs) {
    const name = meta.runs.length > 1 ? `${run.name}: ` : "";
    for (const finding of run.findings) rows.push(h("li", { className: "finding" }, safe(name + finding)));
    for (const problem of run.problems) rows.push(h("li", { className: "problem" }, safe(name + problem)));
  }
  if (!rows.length) rows.push(h("li", { className: "good" }, "No diagnosis: nothing that the doctor of a run looks for was seen."));
  return card("Findings", h("ul", { className: "findings" }, rows));
}

// Rows of agents, a bar wherever the agent was trained.
function learntWhen(run) {
  const names = run.agents.filter((name) => run.metrics.columns[`trained/${name}`]);
  const x = run.metrics.iterations;
  if (!names.length || !x.length) return null;
  const [width, row, left] = [720, 24, 120];
  const unit = (width - left) / x.length;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${names.length * row + 18}`, class: "strip", role: "img" });
  names.forEach((name, r) => {
    const label = svg("text", { x: 0, y: r * row + 16 });
    label.textContent = plain(name).slice(0, 16);
    drawing.append(label, svg("rect", { x: left, y: r * row + 5, width: width - left, height: row - 10, class: "frozen" }));
    const trained = run.metrics.columns[`trained/${name}`];
    for (let i = 0; i < x.length; ) {
      let j = i;
      while (j < x.length && trained[j] > 0 === trained[i] > 0) j++;
      if (trained[i] > 0) drawing.append(svg("rect", { x: left + i * unit, y: r * row + 5, width: Math.max(1, (j - i) * unit - 0.5), height: row - 10, fill: agentColor(name) }));
      i = j;
    }
  });
  const mark = (at, text, anchor) => {
    const label = svg("text", { x: at, y: names.length * row + 14, "text-anchor": anchor, class: "tick" });
    label.textContent = text;
    return label;
  };
  drawing.append(mark(left, `iteration ${x[0]}`, "start"), mark(width, String(x[x.length - 1]), "end"));
  return drawing;
}

function overviewPage() {
  const scores = runGroups().length > 1
    ? seriesOf(held(meta.runs[0]).name, "evaluations")
    : ["eval/greedy", ...new Set(meta.runs.flatMap((run) => Object.keys(run.evaluations.columns)).filter((name) => /^eval\/(avg|pass)@/.test(name)))]
        .map((name, i) => ({ ...seriesOf(name, "evaluations")[0], label: name.slice(5), color: PALETTE[[1, 0, 2][i] ?? i] }))
        .filter((one) => one.runs);
  const strips = meta.runs.slice(0, 6).map((run) => [run, learntWhen(run)]).filter(([, strip]) => strip);
  return [
    ...meta.runs.map(tiles),
    h("div", { className: "grid two" },
      card("Evaluation score", chart(scores, { height: 230, points: true })),
      card("Score while training", chart(seriesOf("score", "metrics"), { height: 230 })),
      card("Reward of each agent", chart(seriesOf("reward", "metrics"), { height: 230 })),
      h("div", { className: "stack" },
        strips.length ? card("Who learnt when", ...strips.map(([run, strip]) => h("div", {}, strips.length > 1 ? h("h3", {}, safe(run.name)) : null, strip))) : null,
        findingsCard()),
    ),
  ];
}
