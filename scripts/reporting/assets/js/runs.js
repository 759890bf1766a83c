// Runs side by side: their scores, and the settings in which they differ.
function table(head, rows) {
  return h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((cell) => h("th", {}, cell)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
}

function told(value) {
  if (value === null || value === undefined) return "–";
  return safe(typeof value === "object" ? JSON.stringify(value) : String(value));
}

function runsPage() {
  const rows = meta.runs.map((run) => {
    const score = held(run);
    const greedy = (run.evaluations.columns["eval/greedy"] || []).filter((value) => value !== null);
    const done = run.metrics.iterations[run.metrics.iterations.length - 1] || 0;
    return [safe(run.name), told(run.settings.algorithm), told(run.settings.seed), String(done), number(score.first), number(score.last), score.points > 1 ? signed(score.last - score.first) : "–", number(greedy[greedy.length - 1]), run.seconds ? `${(run.seconds / 60).toFixed(1)} min` : "–"];
  });
  const page = [card("Runs", table(["run", "algorithm", "seed", "iterations", "before", "after", "change", "greedy after", "training"], rows))];
  const groups = runGroups();
  if (groups.length < meta.runs.length) {
    const spread = groups.map((group) => {
      const scores = group.map((run) => held(run).last).filter((value) => value !== undefined && value !== null);
      const average = scores.reduce((a, b) => a + b, 0) / (scores.length || 1);
      const deviation = Math.sqrt(scores.reduce((sum, value) => sum + (value - average) ** 2, 0) / Math.max(1, scores.length - 1));
      return [safe(groupName(group)), String(group.length), scores.length ? number(average) : "–", scores.length > 1 ? number(deviation) : "–", scores.length ? `${number(Math.min(...scores))} … ${number(Math.max(...scores))}` : "–"];
    });
    page.push(card("Over seeds", table(["runs that differ in the seed only", "seeds", "mean after", "standard deviation", "range"], spread)));
  }
  const names = [...new Set(meta.runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const text = (run, name) => JSON.stringify(run.settings[name] ?? null);
  const differing = names.filter((name) => new Set(meta.runs.map((run) => text(run, name))).size > 1);
  if (meta.runs.length > 1) page.push(card("Settings that differ", differing.length ? table(["setting", ...meta.runs.map((run) => safe(run.name))], differing.map((name) => [name, ...meta.runs.map((run) => told(run.settings[name]))])) : h("p", {}, "None.")));
  for (const run of meta.runs.slice(0, 8)) {
    const prompts = Object.entries(run.prompts);
    page.push(card(meta.runs.length > 1 ? `Team and settings of ${plain(run.name)}` : "Team and settings",
      prompts.map(([agent, prompt]) => h("div", { className: "turn", style: { borderLeftColor: agentColor(agent) } }, h("strong", { style: { color: agentColor(agent) } }, safe(agent)), longText(prompt || "(no role prompt)", "seen"))),
      folded("all settings", () => table(["setting", "value"], Object.entries(run.settings).map(([name, value]) => [name, told(value)])))));
  }
  return page;
}
