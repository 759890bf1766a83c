// The same problems before and after: the first and the last evaluation of a run, task by task.
function evaluationTasks(r) {
  const rows = index.run.map((run, row) => row).filter((row) => index.run[row] === r && index.kind[row] > 0);
  if (!rows.length) return null;
  const times = [...new Set(rows.map((row) => index.iteration[row]))].sort((a, b) => a - b);
  const [first, last] = [times[0], times[times.length - 1]];
  if (first === last) return { first, last, tasks: [] };
  const tasks = new Map();
  for (const row of rows) {
    const side = index.iteration[row] === first ? "before" : index.iteration[row] === last ? "after" : null;
    if (!side) continue;
    const task = tasks.get(index.group[row]) || tasks.set(index.group[row], { before: [], after: [] }).get(index.group[row]);
    task[side].push(row);
  }
  const average = (some) => some.reduce((sum, row) => sum + (index.score[row] || 0), 0) / some.length;
  const found = [...tasks].filter(([, task]) => task.before.length && task.after.length).map(([group, task]) => ({ group, ...task, was: average(task.before), is: average(task.after), title: index.title[task.before[0]] }));
  return { first, last, tasks: found };
}

function beforeAfterPage() {
  const page = [];
  const pane = h("div", { className: "grid two", id: "sides" });
  const chosen = { run: 0 };
  const list = h("div", { className: "tasks" });
  const draw = () => {
    const found = evaluationTasks(chosen.run);
    pane.replaceChildren();
    if (!found || !found.tasks.length) {
      list.replaceChildren(h("p", {}, found ? "There is one recorded evaluation only, so there is nothing to compare yet." : "No evaluation of this run is recorded."));
      return;
    }
    const { tasks, first, last } = found;
    const better = tasks.filter((task) => task.is > task.was + 1e-9).length;
    const worse = tasks.filter((task) => task.is < task.was - 1e-9).length;
    tasks.sort((a, b) => b.is - b.was - (a.is - a.was));
    list.replaceChildren(
      h("p", { className: "quiet" }, `${plural(tasks.length, "task")}: ${better} better after iteration ${last} than after iteration ${first}, ${worse} worse, ${tasks.length - better - worse} equal.`),
      h("div", { className: "rows tall" }, tasks.slice(0, 1000).map((task) => h("div", { className: "row flow", onclick: (event) => show(task, first, last, event.currentTarget) },
        h("span", { className: "score " + tone(task.was) }, number(task.was, 2)), "→", h("span", { className: "score " + tone(task.is) }, number(task.is, 2)), h("div", { className: "row-title" }, safe(task.title))))),
    );
    list.querySelector(".row").click();
  };
  const show = async (task, first, last, node) => {
    list.querySelectorAll(".picked").forEach((other) => other.classList.remove("picked"));
    node.classList.add("picked");
    const pick = (rows) => rows.find((row) => KINDS[index.kind[row]] === "greedy") ?? rows[0];
    const sides = await Promise.all([task.before, task.after].map(async (rows) => conversation(await episode(pick(rows)), pick(rows), { heat: false, words: "" })));
    pane.replaceChildren(...sides.map((side, i) => card(i ? `After iteration ${last}` : `Before: iteration ${first}`, side)));
  };
  if (meta.runs.length > 1) page.push(h("div", { className: "bar" }, select(meta.runs.map((run, i) => [i, plain(run.name)]), 0, (value) => ((chosen.run = +value), draw()))));
  draw();
  return [...page, h("div", { className: "panes" }, list, h("div", { className: "pane" }, pane))];
}
