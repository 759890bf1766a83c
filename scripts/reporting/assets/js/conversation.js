// One episode as a conversation, with a heat map of the advantage of every token.
const TURNS_AT_ONCE = 60;

// A colour for a number: blue above zero, orange below it; nothing near zero.
function heat(value, most) {
  const share = Math.max(-1, Math.min(1, most ? value / most : 0));
  const strength = Math.abs(share) ** 0.7 * 0.75;
  return share >= 0 ? `rgba(41, 112, 222, ${strength})` : `rgba(233, 120, 20, ${strength})`;
}

function tokensOf(turn) {
  const ends = turn.token_ends;
  const values = turn.advantages;
  if (typeof values === "number") return [{ start: 0, end: turn.text.length, value: values }];
  if (!Array.isArray(values) || !Array.isArray(ends)) return null;
  // Ends count characters; JavaScript counts UTF-16 units, which differ beyond U+FFFF.
  const units = turn.text.length === (ends[ends.length - 1] || 0) ? null : unitOffsets([...turn.text]);
  let start = 0;
  return ends.map((end, i) => {
    const stop = units ? units[Math.min(end, units.length - 1)] : end;
    const token = { start, end: stop, value: values[i] };
    start = stop;
    return token;
  });
}

function unitOffsets(points) {
  const offsets = [0];
  for (const point of points) offsets.push(offsets[offsets.length - 1] + point.length);
  return offsets;
}

function heatText(turn, most) {
  const tokens = tokensOf(turn);
  if (!tokens) return longText(turn.text);
  return longText(turn.text, "heat", (text, end) => {
    const fragment = document.createDocumentFragment();
    for (const token of tokens) {
      if (token.start >= end) break;
      if (fragment.childNodes.length > MANY / 2) {
        fragment.append(safe(text.slice(token.start, end)));
        break;
      }
      if (token.end > token.start)
        fragment.append(h("span", { className: "token", style: { backgroundColor: heat(token.value, most) }, title: `advantage ${signed(token.value)}` }, safe(text.slice(token.start, Math.min(token.end, end)))));
    }
    return fragment;
  });
}

function folded(title, content, open) {
  const box = h("details", {}, h("summary", {}, title));
  box.addEventListener("toggle", () => box.open && box.children.length === 1 && box.append(content()), { once: true });
  box.open = Boolean(open);
  return box;
}

function observationNodes(seen) {
  if (typeof seen === "string") return longText(seen, "seen");
  if (!Array.isArray(seen)) return h("p", { className: "quiet" }, "not recorded");
  return h("div", {}, seen.map((message) => h("div", { className: "message" }, h("span", { className: "role" }, plain(message.role || "?")), longText(typeof message.content === "string" ? message.content : JSON.stringify(message.content), "seen"))));
}

function fact(label, value, title) {
  return h("span", { className: "fact", title: title || "" }, h("b", {}, label), " ", value);
}

function verdictNodes(name, verdict) {
  if (!verdict) return null;
  if (verdict.unscored !== undefined || typeof verdict.score !== "number") return h("div", { className: "verdict" }, h("b", {}, `${name}: not scored`), " ", safe(String(verdict.unscored ?? verdict.reason ?? "")));
  const spans = (verdict.spans || []).map(([quote, score]) => h("li", {}, h("q", {}, safe(String(quote))), ` ${number(score, 1)}`));
  return h("div", { className: "verdict" }, h("b", {}, `${name}: ${+verdict.score.toFixed(1)} of 10`), " ", safe(String(verdict.reason || "")), spans.length ? h("ul", {}, spans) : null);
}

const PARTS = {
  reward: "given by the environment to this turn",
  coach: "the coach's score",
  outcome: "this turn's part of the outcome",
  kl: "penalty for leaving the reference",
  later: "what later turns are paid, and this one made possible; beside what it is paid itself",
};

function turnNodes(turn, run, options) {
  const facts = [fact("tokens", String(turn.tokens ?? "–")), turn.stop === "length" ? h("span", { className: "fact warn" }, "cut at the token limit") : null];
  if (turn.reward !== null && turn.reward !== undefined) facts.push(fact("reward", number(turn.reward), "given by the environment"));
  if (turn.paid !== null && turn.paid !== undefined) facts.push(fact("paid", number(turn.paid), "the reward that credit assignment used"));
  for (const [name, told] of Object.entries(PARTS)) {
    const amount = turn.parts && turn.parts[name];
    if (typeof amount === "number") facts.push(fact(name === "later" ? "later pay" : `of it ${name}`, signed(amount), told));
  }
  if (typeof turn.return === "number") facts.push(fact("return", number(turn.return), "what the rule credits the turn with, at its first token"));
  if (typeof turn.value === "number") facts.push(fact("value", number(turn.value), "the critic's prediction, at the first token"));
  if (typeof turn.baseline === "number") facts.push(fact("compared with", number(turn.baseline), "mean return of the turns that this one is compared with; the difference, scaled, is the advantage or its last term"));
  for (const [name, amount] of Object.entries(turn.terms || {})) if (typeof amount === "number") facts.push(fact(`by ${name}`, signed(amount), "a term of the advantage, before the batch is normalised"));
  if (turn.advantage !== undefined) facts.push(fact("advantage", signed(turn.advantage), "mean over the tokens"));
  const prompt = run.prompts[turn.agent];
  const evidence = turn.evidence || {};
  return h("article", { className: "turn", style: { borderLeftColor: agentColor(turn.agent) } },
    h("div", { className: "who" }, h("strong", { style: { color: agentColor(turn.agent) } }, safe(String(turn.agent))), h("span", { className: "facts" }, facts)),
    prompt ? folded("role prompt", () => longText(prompt, "seen")) : null,
    turn.observation === undefined || turn.observation === null ? null : folded("observation", () => observationNodes(turn.observation), turn.turn === 0),
    options.heat && turn.advantages !== undefined ? heatText(turn, options.most) : longText(turn.text, "", (text, end) => marked(text.slice(0, end), options.words)),
    evidence.tool_output ? h("div", { className: "tool" }, h("span", { className: "role" }, "tool output"), longText(evidence.tool_output, "seen")) : null,
    verdictNodes("coach", turn.coach),
    verdictNodes("the environment's own rules, which pay nothing without a coach", turn.coach ? null : evidence.rules),
    evidence.facts ? folded("facts", () => longText(JSON.stringify(evidence.facts, null, 1), "seen")) : null,
  );
}

function conversation(record, row, options) {
  const run = meta.runs[index.run[row]];
  const all = (record.turns || []).flatMap((turn) => (Array.isArray(turn.advantages) ? turn.advantages : [turn.advantages ?? 0]));
  const most = all.reduce((top, value) => Math.max(top, Math.abs(value ?? 0)), 0);
  const shown = { ...options, most };
  const turns = h("div", { className: "turns" });
  const more = h("button", { className: "link" });
  const add = () => {
    const from = turns.children.length;
    turns.append(...record.turns.slice(from, from + TURNS_AT_ONCE).map((turn) => turnNodes(turn, run, shown)));
    const left = record.turns.length - turns.children.length;
    more.textContent = `show ${Math.min(left, TURNS_AT_ONCE)} more of ${left} turns`;
    more.hidden = left < 1;
  };
  more.addEventListener("click", add);
  record.turns = Array.isArray(record.turns) ? record.turns : [];
  add();
  const score = index.score[row];
  return h("div", { className: "conversation" },
    h("div", { className: "episode-head" },
      h("span", { className: "score " + tone(score) }, number(score, 2)),
      h("span", {}, `episode ${index.number[row]} · ${KIND_NAMES[KINDS[index.kind[row]]]} · iteration ${index.iteration[row]}`),
      meta.runs.length > 1 ? h("span", { className: "quiet" }, safe(run.name)) : null,
      record.info && record.info.ended && record.info.ended !== "terminated" ? h("span", { className: "fact warn" }, safe(String(record.info.ended))) : null,
      options.heat && most ? h("span", { className: "scale" }, h("i", { style: { background: heat(-most, most) } }), `−${number(most, 2)}`, h("i", { style: { background: heat(most, most) } }), `+${number(most, 2)} advantage`) : null,
    ),
    record.info && Object.keys(record.info).length ? folded("task", () => longText(JSON.stringify(record.info, null, 1), "seen")) : null,
    turns,
    more,
    record.alternatives && record.alternatives.length ? folded(plural(record.alternatives.length, "alternative") + " that were not carried on", () => h("div", { className: "turns" }, record.alternatives.slice(0, TURNS_AT_ONCE).map((turn) => turnNodes(turn, run, shown)))) : null,
  );
}

function tone(score) {
  return score === null || score === undefined ? "none" : score >= 1 ? "high" : score > 0 ? "middle" : "low";
}
