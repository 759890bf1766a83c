// Text of models and judges: control characters become visible, long texts are cut until somebody asks for all.
const CUT = 4000;
const MANY = 50000;
const PIECE = 5000;
const HIDDEN =
  /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

// The name of a character that would be invisible, or would reorder or hide its neighbours.
function visible(character) {
  const code = character.charCodeAt(0);
  return code < 32 ? String.fromCharCode(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

function plain(text) {
  return String(text).replace(HIDDEN, visible);
}

// A fragment of `text`, with hidden characters as small marks; a very long text in pieces.
function safe(text) {
  const fragment = document.createDocumentFragment();
  if (String(text).length > MANY) {
    fragment.append(...pieces(String(text)));
    return fragment;
  }
  let done = 0;
  for (const match of String(text).matchAll(HIDDEN)) {
    fragment.append(text.slice(done, match.index), h("span", { className: "hidden-char" }, visible(match[0])));
    done = match.index + match[0].length;
  }
  fragment.append(String(text).slice(done));
  return fragment;
}

// A very long text in pieces that the browser lays out only when they come into view.
function pieces(text) {
  const found = [];
  for (let start = 0; start < text.length; ) {
    const line = text.lastIndexOf("\n", start + PIECE);
    const end = line > start ? line + 1 : start + PIECE;
    found.push(h("div", { className: "piece" }, plain(text.slice(start, end))));
    start = end;
  }
  return found;
}

function marked(text, words) {
  const wanted = words ? words.toLowerCase() : "";
  if (!wanted) return safe(text);
  const fragment = document.createDocumentFragment();
  const lower = text.toLowerCase();
  let done = 0;
  for (let at = lower.indexOf(wanted), n = 0; at >= 0 && n < 500; at = lower.indexOf(wanted, done), n++) {
    fragment.append(safe(text.slice(done, at)), h("mark", {}, safe(text.slice(at, at + wanted.length))));
    done = at + wanted.length;
  }
  fragment.append(safe(text.slice(done)));
  return fragment;
}

// A block of text. `draw(text, end)` makes the nodes of the first `end` characters.
function longText(text, className, draw) {
  text = String(text);
  draw = draw || ((whole, end) => safe(whole.slice(0, end)));
  const box = h("div", { className: `said ${className || ""}`, dir: "auto" });
  const short = text.length > CUT * 1.2;
  box.append(draw(text, short ? CUT : text.length));
  if (!short) return box;
  const more = h(
    "button",
    {
      className: "link",
      onclick: () => {
        box.replaceChildren(draw(text, text.length));
        more.remove();
      },
    },
    `show all ${text.length.toLocaleString("en")} characters`,
  );
  return h("div", {}, box, more);
}
