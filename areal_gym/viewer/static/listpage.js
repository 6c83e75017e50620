// A page that is one list: a search line, words to click, sortable heads, and only the rows in sight.
import { h, fill, number, shown } from "./dom.js";
import { go, route } from "./route.js";
import { parsedFilter, toggled } from "./filters.js";
import { VirtualRows } from "./virtual.js";

/** A list of items that have a `name` and an `allText` in lower case.
 *
 * `columns`: [{key, label, isText?}]; `terms`: of the search line; `drawRow(item)`: an element; `wordsOf(item)`: the
 * terms offered below the line; `path`: of the page's address, in which search and order are kept. */
export class ListPage {
  #items = [];
  #typing = null;
  found = [];
  current = null;

  constructor({ kind, columns, terms, placeholder, sort, rowHeight, drawRow, wordsOf, path, headClass }) {
    Object.assign(this, { terms, sort, wordsOf, path, columns });
    this.count = h("span.count", { role: "status" });
    this.chips = h("div.chips");
    this.search = h("input.filter", {
      type: "search", placeholder, "aria-label": `search ${kind}`, spellcheck: false,
      oninput: () => { clearTimeout(this.#typing); this.#typing = setTimeout(() => this.setQuery({ q: this.search.value.trim() }), 120); },
      onkeydown: (event) => { if (event.key === "Enter" || event.key === "Escape") { this.search.blur(); this.rows.scroller.focus(); event.preventDefault(); event.stopPropagation(); } },
    });
    this.heads = columns.map(({ key, label, isText }) => h(`button.cell.of-${key}`, {
      "data-key": key, title: `sort by ${label}`, onclick: () => this.#sortBy(key, isText),
    }, label));
    this.rows = new VirtualRows(kind, rowHeight, (i) => drawRow(this.found[i]));
    this.element = h("div.runs", {}, h(`div.run-heads${headClass || ""}`, {}, h("span"), this.heads), this.rows.scroller);
  }

  setQuery(changes) {
    go(this.path, { ...route().query, ...changes }, true);
  }

  /** Show those of the items that the address asks for; `note` stands behind their number. */
  show(items = this.#items, note = "") {
    this.#items = items;
    const query = route().query, line = query.q || "";
    if (document.activeElement !== this.search) this.search.value = line;
    const { tests, text } = parsedFilter(line, this.terms);
    const words = text.toLowerCase().split(" ").filter(Boolean);
    const sort = query.sort || this.sort, key = sort.replace(/^-/, ""), direction = sort.startsWith("-") ? -1 : 1;
    this.found = items.filter((item) => tests.every((test) => test(item)) && words.every((word) => item.allText.includes(word)));
    this.found.sort((a, b) => inOrder(a[key], b[key], direction) || inOrder(a.name, b.name, 1));
    if (!this.found.some((item) => item.name === this.current)) this.current = this.found[0]?.name ?? null;
    for (const head of this.heads) head.dataset.sorted = head.dataset.key === key ? (direction < 0 ? "down" : "up") : "";
    fill(this.count, this.found.length === items.length ? number(items.length) : `${number(this.found.length)} of ${number(items.length)}`, note);
    this.#drawChips(line);
    this.rows.show(this.found.length);
  }

  /** The keys that move in the list. */
  keys() {
    const move = (by) => () => {
      const i = Math.max(0, Math.min(this.found.length - 1, this.found.findIndex((item) => item.name === this.current) + by));
      this.current = this.found[i]?.name ?? null;
      this.rows.redraw();
      this.rows.reveal(i);
    };
    return {
      j: move(1), ArrowDown: move(1), k: move(-1), ArrowUp: move(-1),
      "/": () => { this.search.focus(); this.search.select(); },
    };
  }

  #sortBy(key, isText) {
    const first = isText ? key : `-${key}`, other = isText ? `-${key}` : key;
    this.setQuery({ sort: (route().query.sort || this.sort) === first ? other : first });
  }

  #drawChips(line) {
    const counts = new Map();
    for (const item of this.#items) {
      for (const term of this.wordsOf(item)) counts.set(term, (counts.get(term) || 0) + 1);
    }
    const terms = line.match(/\S*"[^"]*"|\S+/g) || [];
    const useful = [...counts].filter(([term, n]) => n < this.#items.length || terms.includes(term)).sort((a, b) => b[1] - a[1]).slice(0, 24);
    fill(this.chips, useful.map(([term, n]) => h(`button.chip${terms.includes(term) ? ".on" : ""}${term.startsWith("tag:") ? ".tag" : ""}`, {
      "aria-pressed": String(terms.includes(term)), onclick: () => this.setQuery({ q: toggled(line, term) }),
    }, shown(term.replace(/^\w+:/, "").replaceAll('"', "")), " ", h("small", {}, number(n)))));
  }
}

/** A term of a search line whose value may hold spaces. */
export function termOf(name, value) {
  return `${name}:${/\s/.test(value) ? `"${value.replaceAll('"', "")}"` : value}`;
}

/** Compares for a sort; what is not there comes last either way. */
export function inOrder(a, b, direction) {
  if (a === b) return 0;
  if (a === null || a === undefined || a === "") return 1;
  if (b === null || b === undefined || b === "") return -1;
  return direction * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}
