// All metrics as small charts, by family: one chart for `kl`, with a line for each agent.
const FAMILIES = [
  ["Audits of credit", /^(audit|influence|left_out|contribution)/],
  ["Score and reward", /^(score|reward|measure|episodes|env_|prompt_too_long|round_bonus|tree_)/],
  ["Coach", /^(coach|spans)/],
  ["Policy update", /^(policy_loss|kl|ref_kl|clip|ratio|entropy|grad_norm|lr|epochs|compound|importance|trained|adapter_version|staleness|engine)/],
  ["Credit", /^(advantage|explained|groups|anchors|flat|turns_|value_loss|q_tot|replay|sampling)/],
  ["Length", /^(tokens|turns|truncated)/],
];

function curvesPage() {
  const wanted = h("input", { type: "search", placeholder: "filter by name, such as kl or reward", oninput: () => draw() });
  const list = h("div", {});
  const still = [];
  const all = new Map();
  for (const table of ["evaluations", "metrics"])
    for (const run of meta.runs)
      for (const name of Object.keys(run[table].columns)) {
        const family = table === "metrics" ? name.split("/")[0] : name;
        all.set(`${table} ${family}`, { table, family, name });
      }
  for (const [key, { table, family }] of all) {
    const values = new Set(seriesOf(family, table).flatMap((one) => one.runs.flatMap((run) => run.y)).filter((value) => value !== null));
    if (table === "metrics" && values.size < 2) {
      all.delete(key);
      still.push(`${plain(family)} ${values.size ? number([...values][0]) : "–"}`);
    }
  }
  const draw = () => {
    const words = wanted.value.trim().toLowerCase();
    const sections = new Map([["Evaluations", []], ...FAMILIES.map(([title]) => [title, []]), ["Everything else", []]]);
    for (const { table, family, name } of all.values()) {
      if (words && !family.toLowerCase().includes(words)) continue;
      const home = table === "evaluations" ? "Evaluations" : (FAMILIES.find(([, pattern]) => pattern.test(family)) || ["Everything else"])[0];
      const note = meta.explained[name] || meta.explained[family] || "";
      sections.get(home).push(h("section", { className: "card small" }, h("h3", { title: note }, plain(family)), h("p", { className: "quiet clip", title: note }, note), chart(seriesOf(family, table), { height: 150 })));
    }
    list.replaceChildren(...[...sections].filter(([, cards]) => cards.length).map(([title, cards]) => h("div", {}, h("h2", { className: "section" }, title), h("div", { className: "grid three" }, cards))));
    if (still.length && !words) list.append(card("Metrics that never changed", h("p", { className: "quiet" }, still.sort().join(" · "))));
  };
  draw();
  return [h("div", { className: "bar" }, wanted), list];
}
