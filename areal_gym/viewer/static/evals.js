// The list of evaluations, and several of them side by side.
import { h, fill, moment, number, seconds, shown, signed } from "./dom.js";
import { address, go, route } from "./route.js";
import { source } from "./source.js";
import { ListPage, inOrder, termOf } from "./listpage.js";
import { intervalBar, isShare, mainScore } from "./evaluation.js";
import { Samples, average, marksOf } from "./samples.js";
import { commonMessages, dialogue } from "./messages.js";
import { parsedFilter } from "./filters.js";
import { VirtualRows } from "./virtual.js";

const EVAL_COLUMNS = [
  { key: "name", label: "evaluation", isText: true }, { key: "env", label: "environment", isText: true }, { key: "policy", label: "policy", isText: true },
  { key: "started_s", label: "date" }, { key: "num_tasks", label: "tasks" }, { key: "score", label: "pass@1 or reward" }, { key: "passMost", label: "pass@k" },
];
const EVAL_TERMS = {
  numbers: { score: "score", reward: "reward", step: "step", tasks: "num_tasks", temperature: "temperature", seed: "seed" },
  words: { name: "name", env: "env", run: "run", policy: "policy", model: "model", benchmark: "benchmark", split: "split", error: "error" },
  kinds: Object.fromEntries(["running", "finished", "failed", "interrupted", "died", "stopped"].map((state) => [state, (card) => card.status === state])),
};

/** The page of all evaluations. */
export async function evaluationsPage(main) {
  const chosen = new Set();
  let cards = [];
  const list = new ListPage({
    kind: "evaluations", columns: EVAL_COLUMNS, terms: EVAL_TERMS, sort: "-started_s", rowHeight: () => (matchMedia("(max-width: 900px)").matches ? 66 : 46), drawRow: evalRow, path: ["evals"],
    placeholder: "search:  words  env:math  run:tir-1  benchmark:gsm8k  score>0.5", headClass: ".of-evals",
    wordsOf: (card) => [`is:${card.status}`, ...["env", "benchmark", "split"].filter((name) => card[name]).map((name) => termOf(name, card[name]))],
  });
  const compare = h("a.button", {});
  const empty = h("p.empty", { hidden: true }, "No evaluations here yet: areal-gym eval measures a policy.");
  fill(main, h("div.page.full", {}, h("div.bar", {}, h("h1", {}, "Evaluations"), list.count, h("span.spring"), compare), h("div.bar", {}, list.search), list.chips, empty, list.element));

  function show() {
    compare.hidden = cards.length < 2;
    compare.href = address(["evals", "compare"], { ids: JSON.stringify([...chosen]) });
    compare.classList.toggle("off", chosen.size < 2);
    compare.textContent = chosen.size < 2 ? "select two to see them side by side" : `${chosen.size} side by side`;
    empty.hidden = cards.length > 0;
    list.show(cards);
  }

  async function load() {
    cards = (await source.evaluations()).map((card) => {
      const most = card.scores.filter((score) => score.name.startsWith("pass@")).at(-1);
      return {
        ...card, title: card.name, name: card.id, main: mainScore(card), score: mainScore(card)?.value ?? null, most: most && most.name !== "pass@1" ? most : null, passMost: most?.value ?? null,
        started_s: card.started_at ? Date.parse(card.started_at) / 1000 : card.step !== null && card.run !== null ? card.step / 1e6 : null,
        allText: [card.id, card.env, card.benchmark, card.policy, card.model, card.split, card.error, card.status].filter(Boolean).join("\n").toLowerCase(),
      };
    });
    show();
  }

  function evalRow(card) {
    const box = h("input", {
      type: "checkbox", checked: chosen.has(card.id), "aria-label": `select ${card.id}`,
      onchange: () => { if (box.checked) chosen.add(card.id); else chosen.delete(card.id); show(); },
    });
    const reason = card.error || card.problems.join("; ");
    return h(`div.run.of-evals${card.name === list.current ? ".current" : ""}`, { "data-name": card.id },
      h("label.tick", {}, box),
      h("div.of-name", {}, h("a.name", { href: address(["eval", card.id]), title: card.id }, h(`i.state.${card.status}`, { title: card.status }), shown(card.title)),
        h("div.under", {}, reason ? h("span.reason", { title: reason }, shown(card.error ? `${card.status}: ${reason}` : reason)) : null,
          card.status === "running" && card.num_total !== null ? h("span", {}, `${number(card.num_done)} of ${number(card.num_total)} samples`) : null)),
      h("span.what", {}, shown(card.env || "–"), h("small", {}, shown([card.benchmark === card.env ? null : card.benchmark, card.split].filter(Boolean).join(" · ")))),
      h("span.what.of-policy", {}, shown(card.policy || card.model || "–"), h("small", {}, card.temperature === 0 ? "greedy" : card.temperature === null ? "" : `temperature ${number(card.temperature)}`)),
      h("span.num.when", {}, card.started_at ? moment(card.started_s) : "–", h("small", {}, card.duration_s === null ? "" : seconds(card.duration_s))),
      h("span.num.of-tasks", {}, number(card.num_tasks), h("small", {}, card.num_samples === null ? "" : ` × ${number(card.num_samples)}`)),
      h("span.of-bar", {}, card.main && isShare(card.main) ? intervalBar(card.main) : null),
      h("span.num.of-reward", {}, card.main ? h("span", {}, card.is_graded ? h("small", {}, "reward ") : null, number(card.main.value), h("small", {}, card.main.low === null ? "" : ` ${number(card.main.low, 2)}–${number(card.main.high, 2)}`)) : "–"),
      h("span.num.of-most", {}, card.most ? [h("small", {}, `${card.most.name.replace("pass", "")} `), number(card.most.value)] : ""));
  }

  await load();
  return {
    isPolled: true,
    tick: load,
    async route() { show(); },
    keys: {
      ...list.keys(), Enter: () => list.current !== null && go(["eval", list.current]),
      x: () => { if (chosen.has(list.current)) chosen.delete(list.current); else if (list.current !== null) chosen.add(list.current); show(); },
    },
  };
}

const COMPARE_ROW = 27;

/** Several evaluations: their scores, and each sample that they have in common. */
export async function sideBySidePage(main, ids) {
  const cards = await Promise.all(ids.map((id) => source.evaluation(id)));
  const sets = ids.map((id) => new Samples(id));
  const scores = h("section.scores"), count = h("span.count", { role: "status" });
  const right = h("section.right", { "aria-label": "the same sample" });
  const filter = h("input.filter", { type: "search", placeholder: "filter:  spread>0  words", "aria-label": "filter", spellcheck: false, oninput: () => setQuery({ q: filter.value.trim() }) });
  const heads = ["task", ...ids, "spread"].map((key, i) => h(`button.cell${key === "task" ? ".words" : ""}${i > 0 && i <= ids.length ? `.c${(i - 1) % 8}` : ""}`, { "data-key": key, title: `sort by ${cards[i - 1]?.name ?? key}`, onclick: () => sortBy(key) },
    key === "task" ? "sample" : key === "spread" ? "spread" : shown(shortName(cards[i - 1], i))));
  let samples = [], found = [], query = {}, isReading = true, isClosed = false;
  const list = new VirtualRows("samples", () => COMPARE_ROW, (i) => sampleRow(found[i]));
  const width = `minmax(80px, 1fr) repeat(${ids.length}, minmax(44px, 112px)) 60px`;
  const left = h("section.left", {}, scores, h("div.bar", {}, filter, count), h("div.list.beside", { style: { "--beside": width } }, h("div.row.head", { role: "row" }, heads), list.scroller));
  const page = h("div.split.evaluation.side-by-side", {}, left, right);
  fill(main, page);

  function setQuery(changes) { go(["evals", "compare"], { ...route().query, ...changes }, true); }

  function sortBy(key) {
    const first = key === "task" ? key : `-${key}`, other = key === "task" ? "-task" : key;
    setQuery({ sort: (query.sort || "-spread") === first ? other : first });
  }

  function join() {
    const all = new Map();
    sets.forEach((set, i) => {
      for (const [key, sample] of set.tasks) {
        if (!all.has(key)) all.set(key, { key, task: sample.task, place: sample.place, cells: ids.map(() => null) });
        all.get(key).cells[i] = sample;
      }
    });
    samples = [...all.values()];
    for (const sample of samples) {
      const means = sample.cells.map((cell) => cell?.mean ?? null).filter((mean) => mean !== null);
      sample.spread = means.length > 1 ? Math.max(...means) - Math.min(...means) : null;
      sample.num = means.length;
    }
    drawScores();
  }

  function drawScores() {
    fill(scores, h("h1", {}, "Side by side"), cards.length ? null : h("p.empty", {}, "No evaluation is selected: choose two in the list of evaluations."), h("div.wide-table", {}, h("table.score-table", {}, h("tbody", {}, cards.map((card, i) => {
      const main = mainScore(card);
      return h("tr", {}, h(`th.c${i % 8}`, {}, h("i.swatch"), ` ${i + 1} `, h("a", { href: address(["eval", card.id]) }, shown(card.name)), h("small", {}, shown(` ${labelOfPolicy(card)}`))),
        h("td", {}, main ? h("b", {}, number(main.value)) : "–"), h("td", {}, main && main.low !== null ? h("small", {}, `${number(main.low)} to ${number(main.high)}`) : ""),
        h("td.wide", {}, main && isShare(main) ? intervalBar(main, i % 8) : null), h("td", {}, i ? h("small", {}, differenceOf(samples, i)) : null));
    })))), isReading ? null : h("p.hint", {}, "Differences are of the mean score over common samples, with their 95% interval; they do not include the variation between seeds."));
  }

  function show() {
    query = route().query;
    if (document.activeElement !== filter) filter.value = query.q || "";
    const { tests, text } = parsedFilter(query.q || "", { numbers: { spread: "spread", evaluations: "num" }, words: { task: "task" }, kinds: {} });
    const words = text.toLowerCase().split(" ").filter(Boolean);
    found = samples.filter((sample) => tests.every((test) => test(sample)) && words.every((word) => sample.task.toLowerCase().includes(word)));
    const sort = query.sort || "-spread", key = sort.replace(/^-/, ""), direction = sort.startsWith("-") ? -1 : 1;
    const at = ids.indexOf(key);
    const value = (sample) => (at >= 0 ? sample.cells[at]?.mean ?? null : sample[key]);
    found.sort((a, b) => inOrder(value(a), value(b), direction) || inOrder(a.place, b.place, 1));
    for (const head of heads) head.dataset.sorted = head.dataset.key === key ? (direction < 0 ? "down" : "up") : "";
    fill(count, found.length === samples.length ? number(samples.length) : `${number(found.length)} of ${number(samples.length)}`, " samples", isReading ? " …" : "");
    list.show(found.length);
  }

  function sampleRow(sample) {
    const open = (places = null) => setQuery({ sample: sample.key, ...(places === null ? {} : { attempt: places }) });
    return h(`div.row${sample.key === query.sample ? ".selected" : ""}`, { role: "row", "data-task": sample.task, onclick: () => open("0") },
      h("span.cell.words", { title: sample.task }, shown(sample.task)),
      sample.cells.map((cell) => h("span.cell", {}, cell ? [h("span.mean", {}, number(cell.mean, 2), " "), marksOf(cell.members.slice(0, 4), { onOpen: (row) => open(String(row.attempt)) })] : "–")),
      h("span.cell", {}, number(sample.spread, 2)));
  }

  let drawn = "";
  async function openSample() {
    const sample = samples.find((one) => one.key === query.sample);
    page.classList.toggle("is-open", Boolean(sample));
    const key = sample ? `${sample.key}\n${query.attempt}` : "";
    if (key === drawn) return;
    drawn = key;
    if (!sample) { fill(right, h("p.empty", {}, "Select a sample: click on one, or press ", h("kbd", {}, "j"), ".")); return; }
    const rows = sample.cells.map((cell) => cell && (cell.members.find((row) => String(row.attempt) === query.attempt) || cell.members[0]));
    const read = await Promise.all(rows.map((row, i) => (row ? source.sample(ids[i], row.place) : null)));
    if (drawn !== key) return;
    const there = read.filter(Boolean);
    const common = there.length > 1 ? commonMessages(there) : 0;
    fill(right,
      h("header.head", {}, h("div.line", {}, h("button.icon.back", { title: "back to the list  Esc", onclick: () => setQuery({ sample: "" }) }, "←"), h("b.id", {}, shown(sample.task)))),
      h("div.body.of-siblings", {},
        h("div.shared", {}, there.length ? dialogue({ ...there[0], messages: there[0].messages.slice(0, common), turns: [] }) : null),
        h("div.columns", {}, read.map((trajectory, i) => h("section.column", {},
          h("header", {}, h(`b.c${i % 8}.name-of`, {}, `${i + 1} `, shown(labelOfPolicy(cards[i]) || cards[i].name)), " ", rows[i] ? [number(rows[i].reward), " ", marksOf(sample.cells[i].members, { selected: rows[i].place, onOpen: (row) => setQuery({ attempt: String(row.attempt) }) }),
            " ", h("a", { href: address(["eval", ids[i], String(rows[i].place), "tokens"]) }, "tokens")] : "–"),
          trajectory ? dialogue(trajectory, common) : h("p.hint", {}, "This evaluation does not have the sample."))))));
  }

  function move(by) {
    return () => {
      const i = Math.max(0, Math.min(found.length - 1, found.findIndex((sample) => sample.key === query.sample) + by));
      if (found[i]) { setQuery({ sample: found[i].key }); list.reveal(i); }
    };
  }

  drawScores();
  show();
  const reading = Promise.all(sets.map((set) => set.read())).then(async () => {
    isReading = false;
    if (isClosed) return;
    join();
    show();
    await openSample();
  });
  await reading;
  return {
    tick() {}, async route() { show(); await openSample(); }, close() { isClosed = true; },
    keys: { j: move(1), ArrowDown: move(1), k: move(-1), ArrowUp: move(-1), "/": () => { filter.focus(); filter.select(); }, Escape: () => setQuery({ sample: "" }) },
  };
}

function shortName(card, place) {
  return card.step === null ? `${place}` : `${place} · step ${card.step}`;
}

/** The policy, unless the name says it already. */
function labelOfPolicy(card) {
  return card.policy && card.policy !== card.name ? card.policy : "";
}

/** The mean difference of evaluation i to the first one, over the samples that both have scored. */
function differenceOf(samples, i) {
  const differences = samples.map(({ cells }) => (cells[0]?.mean === undefined || cells[i]?.mean === undefined || cells[0].mean === null || cells[i].mean === null ? null : cells[i].mean - cells[0].mean)).filter((value) => value !== null);
  if (differences.length < 2) return "";
  const mean = average(differences);
  const variance = differences.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (differences.length - 1);
  return `${signed(mean)} ± ${number(1.96 * Math.sqrt(variance / differences.length), 2)} over ${number(differences.length)} samples`;
}
