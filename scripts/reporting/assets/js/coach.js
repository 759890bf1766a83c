// The coach against the outcome: does it give high scores to what turned out right?
function coachPage() {
  const judged = Object.keys(index.coach);
  const page = [];
  if (judged.length) {
    const cards = judged.map((agent) => {
      const right = new Array(11).fill(0);
      const wrong = new Array(11).fill(0);
      index.coach[agent].forEach((score, row) => {
        if (score === null || index.score[row] === null) return;
        (index.score[row] >= 1 ? right : wrong)[Math.max(0, Math.min(10, Math.round(score)))]++;
      });
      return card(plain(agent), bars(right, wrong), h("p", { className: "quiet" }, verdictWords(right, wrong)));
    });
    page.push(h("h2", { className: "section" }, "Scores of the coach, by outcome of the episode"), h("p", { className: "legend" }, h("span", { className: "dot right" }), "solved (outcome 1 or more) ", h("span", { className: "dot wrong" }), "not solved"), h("div", { className: "grid three" }, cards));
  }
  const curves = ["coach_score", "coach_correlation", "coach_unscored_share", "coach_accepted_score", "coach_rejected_score"].map((family) => [family, seriesOf(family, "metrics")]).filter(([, series]) => series.length);
  page.push(h("div", { className: "grid three" }, curves.map(([family, series]) => h("section", { className: "card small" }, h("h3", {}, family), h("p", { className: "quiet clip" }, meta.explained[family] || meta.explained[Object.keys(meta.explained).find((name) => name.startsWith(family))] || ""), chart(series, { height: 150 })))));
  return judged.length || curves.length ? page : [card("Coach", h("p", {}, "No turn of these runs was judged by a coach."))];
}

function mean(counts) {
  const all = counts.reduce((a, b) => a + b, 0);
  return all ? counts.reduce((sum, count, score) => sum + count * score, 0) / all : null;
}

function verdictWords(right, wrong) {
  const [a, b] = [mean(right), mean(wrong)];
  if (a === null || b === null) return `mean score ${number(a ?? b, 1)}; all recorded episodes have the same outcome`;
  return `mean score ${number(a, 1)} where the episode was solved, ${number(b, 1)} where it was not`;
}

function bars(right, wrong) {
  const [width, height] = [330, 130];
  const all = [right.reduce((a, b) => a + b, 0) || 1, wrong.reduce((a, b) => a + b, 0) || 1];
  const top = Math.max(...right.map((n) => n / all[0]), ...wrong.map((n) => n / all[1]), 0.01);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height + 18}`, class: "bars" });
  for (let score = 0; score <= 10; score++) {
    const x = score * (width / 11);
    [[right, "right", 3], [wrong, "wrong", 15]].forEach(([counts, name, shift], side) => {
      const tall = (counts[score] / all[side] / top) * (height - 6);
      const bar = svg("rect", { x: x + shift, y: height - tall, width: 11, height: tall, class: name });
      const told = svg("title", {});
      told.textContent = `${counts[score]} episodes with score ${score}, ${name === "right" ? "solved" : "not solved"}`;
      bar.append(told);
      drawing.append(bar);
    });
    const label = svg("text", { x: x + 14, y: height + 14, "text-anchor": "middle", class: "tick" });
    label.textContent = score;
    drawing.append(label);
  }
  return drawing;
}
