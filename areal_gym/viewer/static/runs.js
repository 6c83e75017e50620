// The list of runs: searched, sorted, compared, annotated; only the rows in sight are drawn.
import { h, fill, fixed, moment, number, seconds, shown } from "./dom.js";
import { address, go } from "./route.js";
import { source } from "./source.js";
import { spark } from "./charts.js";
import { ListPage, termOf } from "./listpage.js";
import { editRun } from "./edit.js";

const RUN_COLUMNS = [
  { key: "name", label: "run", isText: true }, { key: "env", label: "environment", isText: true }, { key: "changed_s", label: "date" }, { key: "duration_s", label: "duration" },
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
  let cursor = "", canEdit = false, numUnread = 0, isClosed = false;
  const list = new ListPage({
    kind: "runs", columns: RUN_COLUMNS, terms: RUN_TERMS, sort: "-changed_s", rowHeight: runHeight, drawRow: runRow, path: [],
    placeholder: "search:  words  tag:baseline  is:failed  env:math  reward>0.5",
    wordsOf: (card) => (card.is_stub ? [] : [`is:${card.status}`, ...(card.env ? [termOf("env", card.env)] : []), ...card.tags.map((tag) => termOf("tag", tag))]),
  });
  const compare = h("a.button", {}, "compare");
  fill(main, h("div.page.full", {},
    h("div.bar", {}, h("h1", {}, "Runs"), list.count, h("span.spring"), compare),
    h("div.bar", {}, list.search), list.chips, list.element));

  function show() {
    compare.hidden = cards.size < 2;
    compare.href = address(["compare"], { runs: [...chosen].join(",") });
    compare.classList.toggle("off", chosen.size < 2);
    compare.textContent = chosen.size < 2 ? "select two runs to compare them" : `compare ${chosen.size} runs`;
    list.show([...cards.values()], numUnread ? `, reading ${number(numUnread)} …` : "");
  }

  async function load() {
    const answer = await source.changes(cursor);
    if (answer.is_whole) cards.clear();
    for (const name of answer.gone) { cards.delete(name); chosen.delete(name); }
    for (const card of answer.cards) {
      if (card.is_evaluation) cards.delete(card.name);
      else cards.set(card.name, completed(card));
    }
    canEdit = source.isLive && !answer.is_read_only;
    const isNew = answer.is_whole || answer.cards.length || answer.gone.length || numUnread !== answer.num_unread;
    cursor = answer.cursor;
    numUnread = answer.num_unread;
    if (isNew) show();
  }

  async function loadAll() {
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
    return h(`div.run${card.name === list.current ? ".current" : ""}`, { "data-name": card.name },
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
      h("span.num.heldout", {}, h("small", { title: card.is_graded ? "mean reward on held-out tasks" : "share of held-out tasks solved" }, card.is_graded ? "held-out reward " : "held out "), heldoutOf(card.heldout)),
      canEdit ? h("button.icon.edit", { title: "tags, note, delete  e", "aria-label": `edit ${card.name}`, onclick: () => edit(card.name) }, "✎") : null);
  }

  await load();
  loadAll();
  return {
    tick: load,
    isPolled: true,
    async route() { show(); },
    close() { isClosed = true; },
    keys: {
      ...list.keys(),
      Enter: () => list.current !== null && go(["run", list.current, "curves"]),
      e: () => edit(list.current),
      x: () => {
        if (chosen.has(list.current)) chosen.delete(list.current); else if (list.current !== null) chosen.add(list.current);
        show();
      },
    },
  };
}

function runHeight() {
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
