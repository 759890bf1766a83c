// Elements without markup: text is always set as text, so nothing that a model wrote is ever parsed as HTML.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children.flat());
  return element;
}

function card(title, ...children) {
  return h("section", { className: "card" }, title ? h("h2", {}, title) : null, ...children);
}

function select(options, value, onchange) {
  const box = h("select", { onchange: () => onchange(box.value) });
  for (const [key, label] of options) box.append(h("option", { value: key, selected: String(key) === String(value) }, label));
  return box;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) >= 2) return String(value);
  const size = Math.abs(value);
  if (size && (size < 0.001 || size >= 1e5)) return value.toExponential(2);
  return value.toFixed(digits);
}

function signed(value, digits = 3) {
  return value === null || value === undefined ? "–" : (value >= 0 ? "+" : "−") + number(Math.abs(value), digits);
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}
