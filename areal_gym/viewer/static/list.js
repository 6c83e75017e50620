// The list of a step's trajectories: sorted, filtered, in groups; only visible rows are drawn.
import { h, s, number, seconds, shown } from "./dom.js";
import { VirtualRows } from "./virtual.js";

const ROW = 27;

const COLUMNS = [
  { key: "place", label: "#", width: "44px", text: (row) => String(row.place) },
  { key: "reward", label: "reward", width: "62px", text: (row) => number(row.reward) },
  { key: "advantage", label: "adv", width: "54px", text: (row) => (row.advantage === null ? "" : (row.advantage > 0 ? "+" : "") + row.advantage.toFixed(2).replace("-", "−")), isWide: true },
  { key: "turns", label: "turns", width: "44px", text: (row) => String(row.turns), isWide: true },
  { key: "tokens", label: "tokens", width: "54px", text: (row) => number(row.tokens) },
  { key: "staleness", label: "stale", width: "42px", text: (row) => (row.staleness === null ? "" : String(row.staleness)), isWide: true },
  { key: "time", label: "time", width: "62px", text: (row) => seconds(row.time), isWide: true },
  { key: "stop", label: "stop reason", width: "84px", text: (row) => row.stop },
  { key: "preview", label: "last message", width: "minmax(60px, 1fr)", text: (row) => row.error || row.preview, isText: true },
];

/** A list that draws only the visible rows. */
export class TrajectoryList {
  #view;
  #items = [];
  #folded = new Set();
  #rows = [];
  selected = null;

  constructor({ onOpen, onSort, onFold }) {
    Object.assign(this, { onOpen, onFold });
    this.header = h("div.row.head", { role: "row" }, COLUMNS.map((column) =>
      h(`button.cell${column.isWide ? ".wide" : ""}${column.isText ? ".words" : ""}`, {
        "data-key": column.key, title: `sort by ${column.label}`, onclick: () => onSort(column.key),
      }, column.label)));
    this.#view = new VirtualRows("trajectories", () => ROW, (i) => {
      const item = this.#items[i];
      return item.row ? this.#row(item.row) : this.#group(item);
    });
    this.space = this.#view.space;
    this.scroller = this.#view.scroller;
    this.element = h("div.list", { style: { "--columns": COLUMNS.map((c) => c.width).join(" ") } }, this.header, this.scroller);
  }

  /** Show these rows. `sort`: "-reward" is largest first; `isGrouped`: siblings are next to each other,
   * under a line about their whole group in `all`, whatever the filter keeps of it. */
  show(rows, { sort, isGrouped, all = rows }) {
    const key = sort.replace(/^-/, ""), direction = sort.startsWith("-") ? -1 : 1;
    for (const button of this.header.children) {
      button.dataset.sorted = button.dataset.key === key ? (direction < 0 ? "down" : "up") : "";
    }
    this.#rows = rows;
    const sorted = [...rows].sort((a, b) => direction * compared(a[key], b[key]) || a.place - b.place);
    this.#items = isGrouped ? grouped(sorted, membersOf(all), key, direction, this.#folded) : sorted.map((row) => ({ row }));
    this.#view.show(this.#items.length);
  }

  /** Fold or unfold a group. */
  fold(group) {
    if (this.#folded.has(group)) this.#folded.delete(group); else this.#folded.add(group);
  }

  foldAll() {
    const groups = new Set(this.#rows.map((row) => row.group));
    const areFolded = [...groups].every((group) => this.#folded.has(group));
    this.#folded = areFolded ? new Set() : groups;
  }

  /** Mark the trajectory at `place`, and scroll to it. */
  select(place) {
    if (this.selected === place) return;
    this.selected = place;
    const i = this.#items.findIndex((item) => item.row && item.row.place === place);
    if (i >= 0) this.#view.reveal(i);
    this.#view.redraw();
  }

  /** The place of the trajectory `by` rows further; null at the end. */
  neighbour(by) {
    const places = this.#items.filter((item) => item.row).map((item) => item.row.place);
    if (!places.length) return null;
    const i = places.indexOf(this.selected);
    return i < 0 ? places[0] : places[i + by] ?? null;
  }

  #row(row) {
    const state = row.error ? ".failed" : row.reward >= 1 - 1e-9 ? ".solved" : row.reward > 0 ? ".partly" : "";
    return h(`div.row${state}${row.place === this.selected ? ".selected" : ""}`, {
      role: "row", "data-place": String(row.place), onclick: () => this.onOpen(row.place),
    }, COLUMNS.map((column) => h(
      `span.cell.of-${column.key}${column.isWide ? ".wide" : ""}${column.isText ? ".words" : ""}`, {}, shown(column.text(row)))));
  }

  #group({ group, rows, members, isFolded }) {
    return h("div.row.group", {
      role: "row", onclick: () => { this.fold(group); this.onFold(); },
    }, h("span.fold", {}, isFolded ? "▸" : "▾"), h("span.id", {}, shown(group)), spread(members),
    h("span.mean", {}, "mean ", number(mean(members.map((row) => row.reward))),
      rows.length < members.length ? h("small", {}, ` ${rows.length} of ${members.length} shown`) : null),
    h("span.task", {}, shown(rows[0].task)));
  }
}

function spread(rows) {
  const rewards = rows.map((row) => row.reward);
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  const x = (reward) => 4 + ((reward - low) / (high - low)) * 66;
  const counts = new Map();
  return s("svg.spread", { width: 74, height: 18, role: "img", "aria-label": `rewards ${rewards.map((r) => number(r)).join(", ")}` },
    s("line.rule", { x1: 4, x2: 70, y1: 14, y2: 14 }),
    rewards.map((reward) => {
      const n = counts.get(reward) || 0;
      counts.set(reward, n + 1);
      return s("circle.member", { cx: x(reward), cy: 13 - (n % 6) * 2, r: 2 });
    }));
}

function membersOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    if (!groups.has(row.group)) groups.set(row.group, []);
    groups.get(row.group).push(row);
  }
  return groups;
}

function grouped(sorted, members, key, direction, folded) {
  const groups = membersOf(sorted);
  const isNumeric = typeof sorted[0]?.[key] === "number";
  const weight = (group) => (isNumeric && key !== "place" ? mean(members.get(group).map((row) => row[key] ?? 0)) : groups.get(group)[0][key]);
  const weights = new Map([...groups.keys()].map((group) => [group, weight(group)]));
  const order = [...groups].sort(([a, [first]], [b, [second]]) => direction * compared(weights.get(a), weights.get(b)) || first.place - second.place);
  return order.flatMap(([group, rows]) => {
    const isFolded = folded.has(group);
    return [{ group, rows, members: members.get(group), isFolded }, ...(isFolded ? [] : rows.map((row) => ({ row })))];
  });
}

function compared(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
