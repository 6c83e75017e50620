// The list of runs: searched, sorted, compared, annotated; only the rows in sight are drawn.
import { h, fill, fixed, moment, number, seconds, shown } from "./dom.js";
import { address, go, route } from "./route.js";
import { source } from "./source.js";
import { spark } from "./charts.js";
import { parsedFilter, toggled } from "./filters.js";
import { VirtualRows } from "./virtual.js";
import { editRun } from "./edit.js";

const RUN_COLUMNS = [
  { key: "name", label: "run" }, { key: "env", label: "environment" }, { key: "changed_s", label: "date" }, { key: "duration_s", label: "duration" },
  { key: "step", label: "step" }, { key: "reward", label: "reward" }, { key: "heldoutNow", label: "held out" },
];
const STATES = ["running", "finished", "failed", "interrupted", "died", "stopped"];
const RUN_TERMS = {
  numbers: { step: "step", reward: "reward", heldout: "heldoutNow", seed: "seed", minutes: "minutes" },
  words: { name: "name", env: "env", algorithm: "method", model: "model", error: "error", note: "note", tag: "tagText" },
  kinds: { ...Object.fromEntries(STATES.map((state) => [state, (card) => card.status === state])), damaged: (card) => card.problems.length > 0 },
};

/** For the help page. */
export const RUN_FILTER_HELP = [
  ["is:failed", `also ${STATES.filter((state) => state !== "failed").map((state) => `is:${state}`).join(", ")}, is:damaged`],
  ["tag:baseline", "also name:, env:, algorithm:, model:, error:, note:"],
  ["reward>0.5", "also heldout, step, seed, minutes; with < <= > >= ="],
  ["any words", "in the name, the environment, the tags, the note, the error"],
];

/** The page; `main` is where it goes. */
export async function runsPage(main) {
  const cards = new Map(), chosen = new Set();
  let found = [], current = null, state = {}, cursor = "", canEdit = false, numUnread = 0, typing = null;
  const compare = h("a.button", {}, "compare");
  const count = h("span.count", { role: "status" }), chips = h("div.chips");
  const search = h("input.filter", {
    type: "search", placeholder: "search:  words  tag:baseline  is:failed  env:math  reward>0.5", "aria-label": "search runs", spellcheck: false,
    oninput: () => { clearTimeout(typing); typing = setTimeout(() => setQuery({ q: search.value.trim() }), 120); },
    onkeydown: (event) => { if (event.key === "Enter" || event.key === "Escape") { search.blur(); list.scroller.focus(); event.preventDefault(); event.stopPropagation(); } },
  });
  const heads = RUN_COLUMNS.map(({ key, label }) => h(`button.cell.of-${key}`, { "data-key": key, title: `sort by ${label}`, onclick: () => sortBy(key) }, label));
  const list = new VirtualRows("runs", rowHeight, (i) => runRow(found[i]));
  fill(main, h("div.page.full", {},
    h("div.bar", {}, h("h1", {}, "Runs"), count, h("span.spring"), compare),
    h("div.bar", {}, search), chips,
    h("div.runs", {}, h("div.run-heads", {}, h("span"), heads), list.scroller)));

  function setQuery(changes) {
    go([], { ...state, ...changes }, true);
  }

  function sortBy(key) {
    const first = key === "name" || key === "env" ? key : `-${key}`;
    const other = first.startsWith("-") ? key : `-${key}`;
    setQuery({ sort: (state.sort || "-changed_s") === first ? other : first });
  }

  function show() {
    state = route().query;
    if (document.activeElement !== search) search.value = state.q || "";
    const { tests, text } = parsedFilter(state.q || "", RUN_TERMS);
    const words = text.toLowerCase().split(" ").filter(Boolean);
    const sort = state.sort || "-changed_s";
    const key = sort.replace(/^-/, ""), direction = sort.startsWith("-") ? -1 : 1;
    found = [...cards.values()].filter((card) => tests.every((test) => test(card)) && words.every((word) => card.allText.includes(word)));
    found.sort((a, b) => inOrder(a[key], b[key], direction) || b.changed_s - a.changed_s || inOrder(a.name, b.name, 1));
    if (!found.includes(cards.get(current))) current = found[0]?.name ?? null;
    for (const head of heads) head.dataset.sorted = head.dataset.key === key ? (direction < 0 ? "down" : "up") : "";
    fill(count, found.length === cards.size ? number(cards.size) : `${number(found.length)} of ${number(cards.size)}`,
      numUnread ? `, reading ${number(numUnread)} …` : "");
    compare.hidden = cards.size < 2;
    compare.href = address(["compare"], { runs: [...chosen].join(",") });
    compare.classList.toggle("off", chosen.size < 2);
    compare.textContent = chosen.size < 2 ? "select two runs to compare them" : `compare ${chosen.size} runs`;
    drawChips(state.q || "");
    list.show(found.length);
  }

  function drawChips(line) {
    const counts = new Map();
    const add = (term) => counts.set(term, (counts.get(term) || 0) + 1);
    for (const card of cards.values()) {
      if (card.is_stub) continue;
      add(`is:${card.status}`);
      if (card.env) add(`env:${quoted(card.env)}`);
      for (const tag of card.tags) add(`tag:${quoted(tag)}`);
    }
    const terms = line.match(/\S*"[^"]*"|\S+/g) || [];
    const useful = [...counts].filter(([term, n]) => n < cards.size || terms.includes(term)).sort((a, b) => b[1] - a[1]).slice(0, 24);
    fill(chips, useful.map(([term, n]) => h(`button.chip${terms.includes(term) ? ".on" : ""}${term.startsWith("tag:") ? ".tag" : ""}`, {
      "aria-pressed": String(terms.includes(term)), onclick: () => setQuery({ q: toggled(line, term) }),
    }, shown(term.replace(/^\w+:/, "").replaceAll('"', "")), " ", h("small", {}, number(n)))));
  }

  async function load() {
    const answer = await source.changes(cursor);
    if (answer.is_whole) cards.clear();
    for (const name of answer.gone) { cards.delete(name); chosen.delete(name); }
    for (const card of answer.cards) cards.set(card.name, completed(card));
    canEdit = source.isLive && !answer.is_read_only;
    const isNew = answer.is_whole || answer.cards.length || answer.gone.length || numUnread !== answer.num_unread;
    cursor = answer.cursor;
    numUnread = answer.num_unread;
    if (isNew) show();
  }

  let isClosed = false;
  async function loadAll() {
    await load();
    while (numUnread && !isClosed) await load();
  }

  async function edit(name) {
    if (canEdit && cards.has(name) && await editRun(cards.get(name))) await load();
  }

  function runRow(card) {
    const box = h("input", {
      type: "checkbox", checked: chosen.has(card.name), "aria-label": `compare ${card.name}`,
      onchange: () => {
        if (box.checked) chosen.add(card.name); else chosen.delete(card.name);
        show();
      },
    });
    const reason = card.error || (card.problems.length ? `damaged: ${card.problems.join("; ")}` : "");
    const told = [card.status, card.error].filter(Boolean).join(": ");
    return h(`div.run${card.name === current ? ".current" : ""}`, { "data-name": card.name },
      h("label.tick", {}, box),
      h("div.of-name", {},
        h("a.name", { href: address(["run", card.name, "curves"]), title: card.name }, h(`i.state.${card.status}`, { title: told }), shown(card.name)),
        h("div.under", {},
          card.tags.map((tag) => h("span.chip.tag", {}, shown(tag))),
          reason ? h("span.reason", { title: reason }, shown(card.error ? `${card.status}: ${reason}` : reason)) : null,
          card.note ? h("span.note", { title: card.note }, shown(card.note.replace(/\s+/g, " "))) : null)),
      h("span.what", {}, shown([card.env, card.method].filter(Boolean).join(" · ")), h("small", {}, shown(card.model || ""))),
      h("span.num.when", {}, moment(card.changed_s), h("small", { title: "since its start, or since it was resumed" }, card.duration_s === null ? "" : card.duration_s < 1 ? "< 1 s" : seconds(card.duration_s))),
      h("span.num.of-step", {}, card.is_stub ? "…" : `step ${number(card.step)}`, h("small", {}, card.steps === null ? "" : ` / ${number(card.steps)}`)),
      h("span.spark", { title: "mean reward" }, spark(card.rewards)),
      h("span.num.of-reward", {}, h("small", {}, "reward "), fixed(card.reward)),
      h("span.num.heldout", {}, h("small", {}, "held out "), heldoutOf(card.heldout)),
      canEdit ? h("button.icon.edit", { title: "tags, note, delete  e", "aria-label": `edit ${card.name}`, onclick: () => edit(card.name) }, "✎") : null);
  }

  function move(by) {
    return () => {
      const i = Math.max(0, Math.min(found.length - 1, found.indexOf(cards.get(current)) + by));
      current = found[i]?.name ?? null;
      list.redraw();
      list.reveal(i);
    };
  }

  await load();
  if (numUnread) loadAll();
  return {
    tick: load,
    isPolled: true,
    async route() { show(); },
    close() { isClosed = true; },
    keys: {
      j: move(1), ArrowDown: move(1), k: move(-1), ArrowUp: move(-1),
      Enter: () => current !== null && go(["run", current, "curves"]),
      e: () => edit(current),
      x: () => {
        if (chosen.has(current)) chosen.delete(current); else if (current !== null) chosen.add(current);
        show();
      },
      "/": () => { search.focus(); search.select(); },
    },
  };
}

function rowHeight() {
  return matchMedia("(max-width: 900px)").matches ? 66 : 46;
}

/** A card with what is sorted and searched by. */
function completed(card) {
  const method = card.objective === "rl" ? card.algorithm : card.objective;
  const tagText = card.tags.join("\n");
  return {
    ...card, method, tagText, heldoutNow: card.heldout.at(-1) ?? null, minutes: card.duration_s === null ? null : card.duration_s / 60,
    allText: [card.name, card.env, method, card.model, tagText, card.note, card.error, card.is_stub ? "" : card.status].filter(Boolean).join("\n").toLowerCase(),
  };
}

/** The first and the newest measurement; one alone is no change. */
function heldoutOf(measured) {
  const ends = measured.length > 1 ? [measured[0], measured.at(-1)] : measured;
  return ends.length ? ends.map(fixed).join(" → ") : "–";
}

function quoted(text) {
  return /\s/.test(text) ? `"${text.replaceAll('"', "")}"` : text;
}

/** Compares for a sort; what is not there comes last either way. */
export function inOrder(a, b, direction) {
  if (a === b) return 0;
  if (a === null || a === undefined || a === "") return 1;
  if (b === null || b === undefined || b === "") return -1;
  return direction * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}
