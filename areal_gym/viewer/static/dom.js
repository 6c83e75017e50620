// Elements and texts. What runs recorded goes onto the page as text nodes only, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("div.card", {onclick, title}, "text", child, [children], null). */
export function h(spec, attributes, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  return filled(element, attributes, children);
}

/** The same in SVG. */
export function s(spec, attributes, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElementNS(SVG, tag);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  return filled(element, attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") {
      // Through the object model: the page's policy forbids style attributes.
      for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    } else if (value === true) element[name] = true;
    else element.setAttribute(name, value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

// Controls, marks of direction, and what has no width: they would change what a text seems to say.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]/gu;

/** A recorded text as nodes: what cannot be seen is named. */
export function shown(text) {
  const nodes = [];
  let start = 0;
  for (const match of text.matchAll(UNSEEN)) {
    if (match.index > start) nodes.push(text.slice(start, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(h("span.unseen", { title: "an invisible character" }, `U+${code}`));
    start = match.index + match[0].length;
  }
  if (start < text.length) nodes.push(text.slice(start));
  return nodes;
}

const FOLD = 4000;

/** A recorded text that may be long: the first part, and the rest on demand. */
export function folded(text, limit = FOLD) {
  if (text.length <= limit * 1.25) return h("div.text", {}, shown(text));
  const box = h("div.text", {}, shown(text.slice(0, limit)));
  const more = h("button.more", {
    onclick: () => fill(box, shown(text)),
  }, `show all ${text.length.toLocaleString("en")} characters`);
  box.append("… ", more);
  return box;
}

/** A number in few characters. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return minus(value.toLocaleString("en"));
  const size = Math.abs(value);
  if (size >= 1e6) return minus(`${trimmed((value / 1e6).toPrecision(3))}M`);
  if (size >= 1e4) return minus(`${trimmed((value / 1e3).toPrecision(3))}k`);
  if (size >= 100) return minus(value.toFixed(0));
  if (size > 0 && size < 1e-3) return minus(value.toExponential(1).replace(".0e", "e"));
  return minus(trimmed(value.toPrecision(digits)));
}

/** With three decimals, so that columns of them align. */
export function fixed(value) {
  return typeof value === "number" ? minus(value.toFixed(Math.abs(value) < 100 ? 3 : 0)) : "–";
}

function trimmed(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

function minus(text) {
  return text.replace(/^-/, "−");
}

/** The same with its sign. */
export function signed(value, digits = 3) {
  return (value > 0 ? "+" : "") + number(value, digits);
}

/** A time in seconds since 1970, as date and time here. */
export function moment(value) {
  if (!value) return "–";
  const at = new Date(value * 1000), two = (n) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** Seconds, for people. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${number(value * 1e6, 2)} µs`;
  if (value < 1) return `${number(value * 1e3, 3)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  if (value < 6000) return `${number(value / 60, 3)} min`;
  return `${number(value / 3600, 3)} h`;
}
