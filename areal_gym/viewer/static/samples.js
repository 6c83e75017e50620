// The samples of an evaluation: read page by page, joined by task, listed with each attempt's score.
import { h, number, seconds, shown } from "./dom.js";
import { source } from "./source.js";
import { VirtualRows } from "./virtual.js";
import { inOrder } from "./listpage.js";

const SAMPLE_ROW = 27;
const MOST_MARKS = 16;

/** The terms that samples are filtered by; `mean`, `std` and the number of attempts are those of the task. */
export const SAMPLE_TERMS = {
  numbers: { reward: "reward", score: "reward", attempt: "attempt", turns: "turns", tokens: "tokens", time: "time", mean: "mean", disagreement: "disagreement", place: "place" },
  words: { stop: "stop", env: "env", task: "task", error: "error" },
  kinds: {
    solved: (row) => row.success === true, unsolved: (row) => row.success === false, failed: (row) => Boolean(row.error),
    mixed: (row) => row.sample.isMixed, truncated: (row) => ["max_turns", "max_tokens", "truncated"].includes(row.stop),
  },
};

/** For the help page. */
export const SAMPLE_FILTER_HELP = [
  ["disagreement>0", "the standard deviation of a task's scores; also score, mean, attempt, turns, tokens, time"],
  ["is:mixed", "some attempts at the task succeed and some do not; also is:solved, is:unsolved, is:failed, is:truncated"],
  ["stop:max_tokens", "also task:, env:, error:"],
];

const SAMPLE_COLUMNS = [
  { key: "task", label: "sample", width: "minmax(110px, 1fr)", isText: true },
  { key: "reward", label: "score", width: "58px" },
  { key: "attempts", label: "attempts", width: "116px", isMarks: true },
  { key: "disagreement", label: "disagree", width: "76px", isWide: true },
  { key: "tokens", label: "tokens", width: "58px" },
  { key: "time", label: "time", width: "62px", isWide: true },
  { key: "stop", label: "stop reason", width: "132px", isText: true, isWide: true },
  { key: "preview", label: "last answer", width: "minmax(60px, 1.6fr)", isText: true, isWide: true },
];

/** Reads all samples of an evaluation, also those that are still being written. */
export class Samples {
  rows = [];
  tasks = new Map();
  numDamaged = 0;
  #version = null;

  constructor(id) { this.id = id; }

  /** Read what there is beyond the rows so far; `onPage` is called after each page. */
  async read(onPage = () => {}) {
    for (;;) {
      const page = await source.samples(this.id, this.rows.length, this.rows.length ? 20000 : 500); // soon, then the rest
      if (page.version !== this.#version && this.rows.length) {
        this.#clear(page.version);
        continue;
      }
      this.#version = page.version;
      this.numDamaged = page.num_damaged;
      this.#add(page.columns);
      if (page.is_last) break;
      onPage();
    }
    onPage();
  }

  #clear(version) {
    this.rows = [];
    this.tasks = new Map();
    this.#version = version;
  }

  #add(columns) {
    const touched = new Set();
    for (let i = 0; i < columns.task.length; i++) {
      const row = {
        place: this.rows.length, index: columns.index[i], attempt: columns.attempt[i], task: columns.task[i], env: columns.env[i],
        reward: columns.reward[i], success: columns.success[i], turns: columns.turns[i], tokens: columns.tokens[i], time: columns.seconds[i],
        stop: columns.stop[i], error: columns.error[i], preview: columns.preview[i],
      };
      row.group = `${row.env}\n${row.task}`;
      this.rows.push(row);
      let sample = this.tasks.get(row.group);
      if (!sample) this.tasks.set(row.group, sample = { key: row.group, task: row.task, env: row.env, place: row.index, members: [] });
      row.sample = sample;
      // An attempt that was played again replaces the earlier one.
      const same = sample.members.findIndex((other) => other.attempt === row.attempt && other.index === row.index);
      if (same >= 0) sample.members[same] = row; else sample.members.push(row);
      touched.add(sample);
    }
    for (const sample of touched) summarize(sample);
  }
}

function summarize(sample) {
  sample.members.sort((a, b) => a.attempt - b.attempt);
  const scored = sample.members.filter((row) => row.success !== null && row.reward !== null);
  const of = (key) => average(scored.map((row) => row[key]).filter((value) => value !== null));
  const mean = of("reward");
  sample.mean = mean;
  sample.disagreement = mean === null ? null : Math.sqrt(average(scored.map((row) => (row.reward - mean) ** 2)));
  if (sample.disagreement !== null && sample.disagreement < 1e-12) sample.disagreement = 0;
  sample.isMixed = new Set(scored.map((row) => row.success)).size > 1;
  sample.tokens = of("tokens");
  sample.time = of("time");
  sample.stop = [...new Set(sample.members.map((row) => row.stop))].join(", ");
  for (const row of sample.members) { row.mean = mean; row.disagreement = sample.disagreement; }
}

/** The mean of numbers, null of none. */
export function average(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** The class of an attempt's color: it succeeded, in part, not, or could not be scored. */
export function outcomeOf(row) {
  if (row.success === null || row.reward === null) return "failed";
  return row.success ? "solved" : row.reward > 0 ? "partly" : "unsolved";
}

/** Each attempt as a square; a click opens it. */
export function marksOf(members, { selected = null, onOpen }) {
  const marks = members.slice(0, MOST_MARKS).map((row) => h(`button.mark.${outcomeOf(row)}${row.place === selected ? ".on" : ""}`, {
    title: `attempt ${row.attempt + 1}: ${row.success === null ? "not scored" : number(row.reward)}, ${row.stop}`,
    "aria-label": `attempt ${row.attempt + 1} of ${row.task}, ${row.success === null ? "not scored" : `score ${number(row.reward)}`}`,
    tabindex: "-1", onclick: (event) => { event.stopPropagation(); onOpen(row); },
  }));
  return h("span.marks", {}, marks, members.length > MOST_MARKS ? h("small", {}, `+${members.length - MOST_MARKS}`) : null);
}

/** A list of samples, each with its attempts, that draws only the rows in sight. */
export class SampleList {
  #items = [];
  #unfolded = new Set();
  selected = null;

  constructor({ onOpen, onSort, onFold }) {
    Object.assign(this, { onOpen, onFold });
    this.header = h("div.row.head", { role: "row" }, SAMPLE_COLUMNS.map((column) => h(`button.cell.of-${column.key}${column.isWide ? ".wide" : ""}${column.isText ? ".words" : ""}`, {
      "data-key": column.key, title: `sort by ${column.label}`, onclick: () => onSort(column.isMarks ? "mean" : column.key),
    }, column.label)));
    this.rows = new VirtualRows("samples", () => SAMPLE_ROW, (i) => this.#draw(this.#items[i]));
    this.element = h("div.list.samples", { style: { "--columns": SAMPLE_COLUMNS.map((c) => c.width).join(" ") } }, this.header, this.rows.scroller);
  }

  /** Show the samples of these rows, or the rows alone if `isFlat`. */
  show(rows, { sort, isFlat }) {
    const key = sort.replace(/^-/, ""), direction = sort.startsWith("-") ? -1 : 1;
    for (const button of this.header.children) button.dataset.sorted = button.dataset.key === key ? (direction < 0 ? "down" : "up") : "";
    const field = key === "reward" ? "mean" : key;
    const inFile = (a, b) => inOrder(a.index ?? a.place, b.index ?? b.place, 1);
    if (isFlat) {
      this.#items = rows.map((row) => ({ row }));
      this.#items.sort((a, b) => (key === "place" ? direction * inFile(a.row, b.row) : inOrder(a.row[key], b.row[key], direction)) || inFile(a.row, b.row) || a.row.attempt - b.row.attempt);
    } else {
      const samples = [...new Set(rows.map((row) => row.sample))];
      samples.sort((a, b) => inOrder(a[field], b[field], direction) || inFile(a, b));
      const kept = new Set(rows);
      this.#items = samples.flatMap((sample) => [{ sample }, ...(this.#unfolded.has(sample.key) ? sample.members.filter((row) => kept.has(row)).map((row) => ({ row })) : [])]);
    }
    this.rows.show(this.#items.length);
  }

  fold(key) {
    if (this.#unfolded.has(key)) this.#unfolded.delete(key); else this.#unfolded.add(key);
  }

  select(place) {
    if (this.selected === place) return;
    this.selected = place;
    const i = this.#items.findIndex((item) => (item.row ? item.row.place === place : item.sample.members.some((row) => row.place === place)));
    if (i >= 0) this.rows.reveal(i);
    this.rows.redraw();
  }

  /** The place of the attempt `by` rows further; null at the end. */
  neighbour(by) {
    const at = this.#items.findIndex((item) => item.row?.place === this.selected);
    const i = at >= 0 ? at : this.#items.findIndex((item) => item.sample?.members.some((row) => row.place === this.selected));
    const next = this.#items[i < 0 ? 0 : i + by];
    return next ? (next.row ?? next.sample.members[0]).place : null;
  }

  #draw({ row, sample }) {
    const members = row ? [row] : sample.members;
    const isSelected = members.some((member) => member.place === this.selected);
    const isFolded = sample && !this.#unfolded.has(sample.key);
    const shownOf = row || { ...sample, reward: sample.mean };
    const one = row ?? (members.length === 1 ? members[0] : null);
    const open = () => { if (one) this.onOpen(one.place); else { this.fold(sample.key); this.onFold(); } };
    const cell = (key, text, isText = false, isWide = false) => h(`span.cell.of-${key}${isWide ? ".wide" : ""}${isText ? ".words" : ""}`, {}, text);
    return h(`div.row.${one ? outcomeOf(one) : "several"}${isSelected ? ".selected" : ""}`, { role: "row", "data-task": shownOf.task, ...(row ? { "data-place": String(row.place) } : {}), onclick: open },
      cell("task", [sample && !one ? h("span.fold", {}, isFolded ? "▸ " : "▾ ") : null, shown(shownOf.task), row ? h("small", {}, `  attempt ${row.attempt + 1}`) : null], true),
      cell("reward", one && one.success === null ? "–" : number(shownOf.reward)),
      h("span.cell.of-attempts", {}, marksOf(members, { selected: this.selected, onOpen: (member) => this.onOpen(member.place) })),
      cell("disagreement", sample && members.length > 1 ? number(sample.disagreement, 2) : "", false, true),
      cell("tokens", number(shownOf.tokens === null ? null : Math.round(shownOf.tokens))),
      cell("time", seconds(shownOf.time), false, true),
      cell("stop", shown(shownOf.stop), true, true),
      cell("preview", shown((one ?? members[0]).error || (one ?? members[0]).preview), true, true));
  }
}
