// One evaluation: its scores with their intervals, its samples, and the trajectory of the selected one.
import { h, s, fill, moment, number, seconds, shown } from "./dom.js";
import { address, go, route } from "./route.js";
import { source } from "./source.js";
import { parsedFilter, toggled } from "./filters.js";
import { SAMPLE_TERMS, SampleList, Samples, average } from "./samples.js";
import { TABS, TrajectoryView } from "./trajectory.js";

const MOST_COMPARED = 12;
const CHIP_KINDS = ["solved", "unsolved", "mixed", "failed", "truncated"];

/** The page of the evaluation `id`. */
export async function evaluationPage(main, id) {
  const samples = new Samples(id);
  const list = new SampleList({ onOpen: (place) => open(place), onSort: sortBy, onFold: () => show() });
  const view = new TrajectoryView((tab) => open(state.place, tab), (place) => open(place), () => open(null), setQuery, (_, evaluation, place) => source.sample(evaluation, place));
  const filter = h("input.filter", {
    type: "search", placeholder: "filter:  is:mixed  disagreement>0.3  stop:max_tokens  words", "aria-label": "filter", spellcheck: false,
    oninput: () => { clearTimeout(typing); typing = setTimeout(() => setQuery({ q: filter.value.trim() }), 150); },
    onkeydown: (event) => { if (event.key === "Enter" || event.key === "Escape") { filter.blur(); list.rows.scroller.focus(); event.preventDefault(); event.stopPropagation(); } },
  });
  const grouping = h("button.toggle", { title: "join the attempts at a sample  g", onclick: () => setQuery({ flat: state.query.flat ? "" : "1" }) }, "samples");
  const head = h("section.scores"), chips = h("div.chips"), count = h("span.count", { role: "status" }), soFar = h("p.facts-line.so-far");
  const left = h("section.left", {}, head, soFar, h("div.bar", {}, filter, grouping, count), chips, list.element);
  const page = h("div.split.evaluation", {}, left, view.element);
  fill(main, page);
  let card = null, state = {}, typing = null, isReading = true, isClosed = false, listed = "", others = [];

  function read() {
    const { path, query } = route();
    const place = path[2] === undefined ? null : Number(path[2]);
    state = { place: Number.isInteger(place) ? place : null, tab: path[3] || "messages", query };
  }

  async function drawHead() {
    card = await source.evaluation(id);
    fill(head, headOf(card, others));
  }

  async function follows() {
    read();
    if (document.activeElement !== filter) filter.value = state.query.q || "";
    page.classList.toggle("is-open", state.place !== null);
    page.classList.toggle("is-broad", state.place !== null && state.tab === "siblings");
    const asked = JSON.stringify([state.query, samples.rows.length, isReading]);
    if (asked !== listed) show();
    listed = asked;
    list.select(state.place);
    view.expect("evaluation", id, state.place);
    await view.open("evaluation", id, state.place, state.tab, samples.rows, state.query);
  }

  function show() {
    const line = state.query.q || "";
    const { tests, text } = parsedFilter(line, SAMPLE_TERMS);
    const words = text.toLowerCase().split(" ").filter(Boolean);
    const current = samples.rows.filter((row) => row.sample.members.includes(row));
    const found = current.filter((row) => tests.every((test) => test(row))
      && (!words.length || words.every((word) => `${row.task}\n${row.preview}\n${row.error ?? ""}`.toLowerCase().includes(word))));
    const hasSeveral = samples.tasks.size < current.length;
    grouping.hidden = !hasSeveral;
    const isFlat = Boolean(state.query.flat);
    grouping.classList.toggle("on", !isFlat);
    list.show(found, { sort: state.query.sort || "place", isFlat });
    const total = current.length, scored = current.filter((row) => row.success !== null);
    fill(soFar, card.scores.length || !scored.length ? "" : `${number(average(scored.map((row) => Number(row.success))))} of ${number(scored.length)} attempts succeeded so far`);
    fill(count, found.length === total ? number(total) : `${number(found.length)} of ${number(total)}`, " attempts",
      hasSeveral ? ` at ${number(samples.tasks.size)} samples` : "", isReading ? " …" : "",
      samples.numDamaged ? h("span.error", {}, ` ⚠ ${number(samples.numDamaged)} damaged lines`) : null);
    drawChips(line, current);
  }

  function drawChips(line, rows) {
    const counts = new Map();
    const add = (term) => counts.set(term, (counts.get(term) || 0) + 1);
    for (const row of rows) {
      for (const kind of CHIP_KINDS) if (SAMPLE_TERMS.kinds[kind](row)) add(`is:${kind}`);
      add(`stop:${row.stop}`);
    }
    const useful = [...counts].filter(([term, n]) => n < rows.length || line.includes(term)).slice(0, 16);
    fill(chips, useful.map(([term, n]) => h(`button.chip${line.includes(term) ? ".on" : ""}`, { onclick: () => setQuery({ q: toggled(line, term) }) },
      shown(term.replace(/^\w+:/, "")), " ", h("small", {}, number(n)))));
  }

  function open(place, tab = state.tab) {
    const path = ["eval", id];
    if (place !== null && place !== undefined) path.push(String(place), ...(tab === "messages" ? [] : [tab]));
    go(path, state.query, state.place !== null && place !== null);
  }

  function setQuery(changes) {
    const path = ["eval", id];
    if (state.place !== null) path.push(String(state.place), ...(state.tab === "messages" ? [] : [state.tab]));
    go(path, { ...state.query, ...changes }, true);
  }

  function sortBy(key) {
    const now = state.query.sort || "place", isText = ["task", "stop", "preview"].includes(key);
    const first = isText ? key : `-${key}`, other = isText ? `-${key}` : key;
    setQuery({ sort: now === first ? other : first });
  }

  function move(by) {
    return () => {
      const place = list.neighbour(by);
      if (place !== null) open(place);
    };
  }

  read();
  await drawHead();
  source.evaluations().then((all) => { others = all; if (!isClosed) fill(head, headOf(card, others)); }, complainLater);
  let isFirst = true, isOpen = false;
  const reading = samples.read(() => {
    if (isClosed) return;
    if (isFirst) show();
    isFirst = false;
    if (!isOpen && state.place !== null && samples.rows.length > state.place) { isOpen = true; follows(); }
  }).then(() => { isReading = false; return isClosed ? null : follows(); });
  if (state.place === null) reading.catch(complainLater); else await reading;
  return {
    isPolled: card.status === "running",
    async route() { await follows(); },
    async tick() {
      if (isReading || card.status !== "running") return;
      const known = samples.rows.length;
      await drawHead(); // before the samples: those that ended just before the evaluation are read, too
      await samples.read();
      if (samples.rows.length !== known || card.status !== "running") show();
    },
    close() { isClosed = true; },
    keys: {
      j: move(1), ArrowDown: move(1), k: move(-1), ArrowUp: move(-1),
      g: () => setQuery({ flat: state.query.flat ? "" : "1" }),
      "/": () => { filter.focus(); filter.select(); }, Enter: () => list.rows.scroller.focus(), Escape: () => open(null),
      ...Object.fromEntries(TABS.map((tab, i) => [String(i + 1), () => state.place !== null && open(state.place, tab)])),
    },
  };
}

function complainLater(error) {
  window.dispatchEvent(new PromiseRejectionEvent("unhandledrejection", { promise: Promise.resolve(), reason: error, cancelable: true }));
}

/** What was measured and how, and every score. */
function headOf(card, all) {
  const similar = all.filter((other) => other.env === card.env && other.split === card.split);
  const ofRun = similar.filter((other) => card.run !== null && other.run === card.run).sort((a, b) => (a.step ?? 0) - (b.step ?? 0));
  const facts = [
    card.benchmark, card.benchmark === card.env ? null : card.env, card.split, card.policy || card.model,
    card.temperature === null ? null : card.temperature === 0 ? "greedy" : `temperature ${number(card.temperature)}`,
    card.num_tasks === null ? null : `${number(card.num_tasks)} tasks × ${number(card.num_samples)}`,
    card.started_at ? moment(Date.parse(card.started_at) / 1000) : null, card.duration_s === null ? null : seconds(card.duration_s),
  ].filter(Boolean);
  const links = [
    ofRun.length > 1 ? h("a.button", { href: compareAddress(ofRun, card) }, `across ${Math.min(ofRun.length, MOST_COMPARED)} checkpoints`) : null,
    similar.length > ofRun.length && similar.length > 1 ? h("a.button", { href: compareAddress(similar, card) }, `beside ${Math.min(similar.length, MOST_COMPARED) - 1} others of ${card.env}`) : null,
  ];
  const shares = Object.values(card.stops).reduce((sum, value) => sum + (value ?? 0), 0);
  return [
    h("div.bar", {}, h("h1", {}, shown(card.name)), card.status === "finished" ? null : h("span.count", {}, h(`i.state.${card.status}`), ` ${card.status}`, card.num_total === null ? "" : `, ${number(card.num_done)} of ${number(card.num_total)} samples`), h("span.spring"), links),
    h("p.facts-line", {}, shown(facts.join(" · "))),
    card.error ? h("p.reason", {}, shown(`${card.status}: ${card.error}`)) : null,
    card.problems.map((problem) => h("p.reason", {}, shown(problem))),
    card.scores.length ? h("table.score-table", {}, h("tbody", {}, card.scores.map((score) => h("tr", {}, h("th", {}, score.name === "reward" ? "mean reward" : score.name), h("td", {}, h("b", {}, number(score.value))),
      h("td", {}, score.low === null ? "" : h("small", {}, `${number(score.low)} to ${number(score.high)}`)), h("td.wide", {}, isShare(score) ? intervalBar(score) : null))))) : null,
    h("p.facts-line", {},
      card.reward === null || card.is_graded ? null : h("span", {}, h("small", {}, "mean reward "), number(card.reward)),
      card.num_failed ? h("span.error", {}, `${number(card.num_failed)} episodes failed and are in no score`) : null,
      shares ? Object.entries(card.stops).map(([name, value]) => h("span", {}, h("small", {}, shown(`${name} `)), `${number((100 * value) / shares)}%`)) : null),
  ];
}

/** At most twelve of them with this one, those that came last. */
function compareAddress(cards, own) {
  const others = cards.filter((other) => other.id !== own.id).slice(-(MOST_COMPARED - 1));
  const ids = cards.filter((other) => other.id === own.id || others.includes(other)).map((other) => other.id);
  return address(["evals", "compare"], { ids: JSON.stringify(ids) });
}

/** What an evaluation is listed and compared by: the mean reward where rewards are graded, else pass@1. */
export function mainScore(card) {
  return card.scores.find((score) => score.name === (card.is_graded ? "reward" : "pass@1")) || null;
}

/** Whether the score and its interval fit on an axis from 0 to 1: rewards may be any numbers. */
export function isShare({ value, low, high }) {
  return [value, low ?? value, high ?? value].every((x) => x >= 0 && x <= 1);
}

/** A score between 0 and 1 with its 95% interval. */
export function intervalBar({ name, value, low, high }, color = 0) {
  const x = (v) => 2 + 156 * Math.max(0, Math.min(1, v));
  return s("svg.interval", { width: 160, height: 14, role: "img", "aria-label": `${name} ${number(value)}` },
    s("line.rule", { x1: 2, x2: 158, y1: 7, y2: 7 }),
    low === null || high === null ? null : s(`line.whisker.c${color}.thick`, { x1: x(low), x2: x(high), y1: 7, y2: 7 }),
    s(`circle.dot.c${color}`, { cx: x(value), cy: 7, r: 3.2 }));
}
