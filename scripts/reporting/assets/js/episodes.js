// The list of recorded episodes with its filters, beside the conversation that is open.
const ROW = 46;
const filters = { run: "", kind: "train", from: "", to: "", agent: "", outcome: "", low: "", high: "", words: "", sort: "newest", heat: "1", episode: "" };

function matching() {
  const { run, kind, from, to, agent, outcome, low, high } = filters;
  const rewards = agent && index.paid[agent];
  const rows = [];
  for (let row = 0; row < index.run.length; row++) {
    if (run !== "" && index.run[row] !== +run) continue;
    if (kind === "evaluation" ? index.kind[row] === 0 : kind !== "" && KINDS[index.kind[row]] !== kind) continue;
    if (from !== "" && index.iteration[row] < +from) continue;
    if (to !== "" && index.iteration[row] > +to) continue;
    if (agent && (!rewards || rewards[row] === null || rewards[row] === undefined) && !(index.coach[agent] && index.coach[agent][row] !== null)) continue;
    if (outcome && tone(index.score[row]) !== outcome) continue;
    const reward = rewards ? rewards[row] : index.score[row];
    if (low !== "" && !(reward >= +low)) continue;
    if (high !== "" && !(reward <= +high)) continue;
    rows.push(row);
  }
  const by = { number: (a, b) => a - b, newest: (a, b) => b - a, best: (a, b) => (index.score[b] ?? -1e9) - (index.score[a] ?? -1e9), worst: (a, b) => (index.score[a] ?? 1e9) - (index.score[b] ?? 1e9) };
  return rows.sort(by[filters.sort] || by.number);
}

// Rows whose text holds the words, block by block; `told` hears of the progress, `over` tells when to give up.
async function searched(rows, words, told, over) {
  const byBlock = new Map();
  for (const row of rows) (byBlock.get(index.block[row]) || byBlock.set(index.block[row], []).get(index.block[row])).push(row);
  const found = new Set();
  let done = 0;
  for (const [number, some] of byBlock) {
    const records = await block(number);
    if (over()) return null;
    for (const row of some) if (searchable(records[index.place[row]]).includes(words)) found.add(row);
    told(++done / byBlock.size);
  }
  return rows.filter((row) => found.has(row));
}

function virtualList(onpick) {
  const inner = h("div", { className: "rows-inner" });
  const box = h("div", { className: "rows", tabIndex: 0 }, inner);
  let rows = [];
  let picked = null;
  const draw = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 6);
    const last = Math.min(rows.length, first + Math.ceil((box.clientHeight || 600) / ROW) + 14);
    inner.style.height = `${rows.length * ROW}px`;
    inner.replaceChildren(...rows.slice(first, last).map((row, i) => rowNode(row, (first + i) * ROW)));
  };
  const rowNode = (row, top) =>
    h("div", { className: "row" + (row === picked ? " picked" : ""), style: { top: `${top}px` }, onclick: () => onpick(row), "data-row": row },
      h("span", { className: "score " + tone(index.score[row]) }, number(index.score[row], 2)),
      h("div", { className: "row-text" },
        h("div", { className: "row-title" }, safe(index.title[row] || "episode")),
        h("div", { className: "quiet" }, `#${index.number[row]} · ${index.kind[row] === 0 ? "training" : KINDS[index.kind[row]]} · iteration ${index.iteration[row]} · ${plural(index.turns[row], "turn")}${meta.runs.length > 1 ? " · " + plain(meta.runs[index.run[row]].name) : ""}`)));
  box.addEventListener("scroll", () => requestAnimationFrame(draw));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(rows.length - 1, rows.indexOf(picked) + step));
    box.scrollTop = Math.max(0, Math.min(box.scrollTop, at * ROW), at * ROW - box.clientHeight + ROW * 2);
    if (rows.length) onpick(rows[at]);
  });
  return {
    box,
    show: (some) => ((rows = some), (box.scrollTop = 0), draw()),
    pick: (row) => ((picked = row), draw()),
    draw,
  };
}

function episodesPage() {
  if (!index.run.length) return [card("Episodes", h("p", {}, "No episodes are recorded in these runs (see Findings on the overview)."))];
  const count = h("span", { className: "quiet", id: "count" });
  const pane = h("div", { className: "pane" }, h("p", { className: "quiet" }, "Choose an episode."));
  let asked = 0;
  const open = async (row) => {
    filters.episode = String(row);
    remember();
    list.pick(row);
    const record = await episode(row);
    pane.replaceChildren(conversation(record, row, { heat: filters.heat === "1", words: filters.words }));
    pane.scrollTop = 0;
  };
  const list = virtualList(open);
  const apply = async () => {
    const mine = ++asked;
    remember();
    let rows = matching();
    const words = filters.words.trim().toLowerCase();
    if (words) {
      rows = await searched(rows, words, (share) => (count.textContent = `searching … ${Math.round(share * 100)} %`), () => mine !== asked);
      if (rows === null) return;
    }
    count.textContent = `${plural(rows.length, "episode")} of ${index.run.length.toLocaleString("en")}`;
    list.show(rows);
    if (rows.length && !rows.includes(+filters.episode || (filters.episode === "0" ? 0 : -1))) open(rows[0]);
    else if (rows.length) open(+filters.episode);
    else pane.replaceChildren(h("p", { className: "quiet" }, "No episode matches the filters."));
  };
  let waiting = null;
  const later = () => (clearTimeout(waiting), (waiting = setTimeout(apply, 250)));
  const field = (name, attributes) => h("input", { ...attributes, name, value: filters[name], oninput: (event) => ((filters[name] = event.target.value), later()) });
  const choice = (name, options) => { const box = select(options, filters[name], (value) => ((filters[name] = value), apply())); box.name = name; return box; };
  if (!index.kind.includes(0) && filters.kind === "train") filters.kind = "";
  const kinds = [["", "all episodes"], ["train", "training"], ["evaluation", "evaluations"], ["sampled", "evaluations, sampled"], ["greedy", "evaluations, greedy"]];
  const outcomes = [["", "any outcome"], ["high", "solved (1 or more)"], ["middle", "partly (above 0)"], ["low", "0 or less"], ["none", "without outcome"]];
  const sorts = [["number", "oldest first"], ["newest", "newest first"], ["best", "best first"], ["worst", "worst first"]];
  const bar = h("div", { className: "bar" },
    meta.runs.length > 1 ? choice("run", [["", "all runs"], ...meta.runs.map((run, i) => [i, plain(run.name)])]) : null,
    choice("kind", kinds),
    choice("agent", [["", "all agents"], ...agents.map((name) => [name, plain(name)])]),
    choice("outcome", outcomes),
    h("label", {}, "iteration ", field("from", { type: "number", placeholder: "from" }), "–", field("to", { type: "number", placeholder: "to" })),
    h("label", { title: "reward paid to the chosen agent, or the episode's score" }, "reward ", field("low", { type: "number", step: "any", placeholder: "min" }), "–", field("high", { type: "number", step: "any", placeholder: "max" })),
    field("words", { type: "search", placeholder: "search in all texts" }),
    choice("sort", sorts),
    h("label", {}, h("input", { type: "checkbox", name: "heat", checked: filters.heat === "1", onchange: (event) => ((filters.heat = event.target.checked ? "1" : ""), filters.episode !== "" && open(+filters.episode)) }), " advantages"),
    count,
  );
  setTimeout(apply);
  return [bar, h("div", { className: "panes" }, list.box, pane)];
}
