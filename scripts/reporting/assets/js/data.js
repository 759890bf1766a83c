// The data of the report: the index, read at once, and blocks of episodes, opened when they are needed.
async function opened(id) {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const KINDS = ["train", "sampled", "greedy"];
const KIND_NAMES = { train: "training", sampled: "evaluation, sampled", greedy: "evaluation, greedy" };
const blockCache = new Map();
const BLOCKS_KEPT = 80;
let meta = null;
let index = null;
let agents = [];

async function block(number) {
  let found = blockCache.get(number);
  if (found) blockCache.delete(number);
  else found = opened(`block${number}`);
  blockCache.set(number, found);
  if (blockCache.size > BLOCKS_KEPT) blockCache.delete(blockCache.keys().next().value);
  return found;
}

async function episode(row) {
  return (await block(index.block[row]))[index.place[row]];
}

// Everything that a text search looks at.
function searchable(record) {
  const parts = [];
  for (const turn of record.turns || []) {
    parts.push(turn.text, JSON.stringify(turn.observation ?? ""));
    if (turn.evidence) parts.push(turn.evidence.tool_output || "", (turn.evidence.rules || {}).reason || "");
    if (turn.coach) parts.push(turn.coach.reason || "", turn.coach.unscored || "");
  }
  return parts.join("\n").toLowerCase();
}

const PALETTE = ["#3b6fd4", "#e07b22", "#2a9d6f", "#b24ca8", "#c9a227", "#4db3d3", "#d1495b", "#7a7f8c"];

function agentColor(name) {
  return PALETTE[Math.max(0, agents.indexOf(name)) % PALETTE.length];
}

// Runs by group: those of one group differ in the seed only.
function runGroups() {
  const groups = [];
  for (const run of meta.runs) (groups[run.group] = groups[run.group] || []).push(run);
  return groups;
}

function groupName(group) {
  if (group.length === 1) return group[0].name;
  const seeds = group.map((run) => run.seed).join(", ");
  return `${group[0].name.replace(/[-_.]?\d+$/, "") || group[0].name} (seeds ${seeds})`;
}
