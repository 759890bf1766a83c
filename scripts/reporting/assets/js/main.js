// Tabs, the address of a view, and news of a run that goes on.
const TABS = [
  ["overview", "Overview", overviewPage],
  ["curves", "Curves", curvesPage],
  ["coach", "Coach", coachPage],
  ["episodes", "Episodes", episodesPage],
  ["before", "Before and after", beforeAfterPage],
  ["runs", "Runs", runsPage],
];
let current = "overview";

// Without a coach in any of the runs there is nothing to show about one.
function tabs() {
  const judged = Object.keys(index.coach).length || ["coach_score", "coach_unscored_share"].some((family) => seriesOf(family, "metrics").length);
  return TABS.filter(([name]) => name !== "coach" || judged);
}

// The view is kept in the address, so that it can be bookmarked and survives a reload.
function remember() {
  const kept = new URLSearchParams(Object.entries(filters).filter(([name, value]) => value !== "" || name === "kind"));
  history.replaceState(null, "", `#${current}${current === "episodes" ? "?" + kept : ""}`);
}

function recall() {
  const [tab, query] = location.hash.slice(1).split("?");
  if (tabs().some(([name]) => name === tab)) current = tab;
  if (query !== undefined) {
    const kept = new URLSearchParams(query);
    for (const name of Object.keys(filters)) filters[name] = kept.get(name) ?? "";
    filters.sort = filters.sort || "newest";
    if (+filters.episode >= index.run.length) filters.episode = "";
  }
}

function showTab(name) {
  current = name;
  charts.length = 0;
  document.getElementById("tabs").replaceChildren(...tabs().map(([key, label]) => h("button", { className: key === name ? "on" : "", onclick: () => (showTab(key), remember()), "data-tab": key }, label)));
  const page = TABS.find(([key]) => key === name)[2];
  document.body.dataset.tab = name;
  document.getElementById("main").replaceChildren(...page().filter(Boolean));
}

async function followRun() {
  const version = async () => (await fetch("version", { cache: "no-store" })).text();
  let known = await version();
  setInterval(async () => {
    try {
      const now = await version();
      if (now !== known && !document.hidden) location.reload();
    } catch {
      document.getElementById("about").textContent = "The server of this report has ended.";
    }
  }, 3000);
}

(async () => {
  try {
    meta = await opened("meta");
  } catch (error) {
    document.getElementById("main").textContent = `The report cannot be opened by this browser: ${error}. It needs DecompressionStream, which browsers have since 2023.`;
    return;
  }
  index = meta.index;
  agents = [...new Set([...meta.runs.flatMap((run) => run.agents), ...Object.keys(index.paid)])];
  document.getElementById("about").textContent = `mafrt ${meta.version} · ${plural(meta.runs.length, "run")} · ${plural(index.run.length, "episode")}${meta.live ? " · live" : ""}`;
  recall();
  showTab(current);
  addEventListener("hashchange", () => (recall(), showTab(current)));
  document.body.dataset.ready = "1";
  if (meta.live) followRun();
})();
