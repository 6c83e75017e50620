// Settings, plugins and outcome of a run, and the differences between runs.
import { h, fill, fixed, number, seconds, shown } from "./dom.js";
import { source } from "./source.js";
import { curvesPage } from "./curves.js";

/** Settings, outcome, plugins and versions of one run. */
export async function settingsPage(main, run) {
  async function draw() {
    const about = await source.about(run);
    const { provenance, summary, evaluations } = about;
    fill(main, h("div.page.columns-2", {},
      h("section", {}, h("h2", {}, "Settings"), tableOf(flat(about.settings))),
      h("section", {},
        summary ? [h("h2", {}, "Outcome"), tableOf(flat(summary))] : null,
        evaluations.length ? [h("h2", {}, "Held-out tasks"), evaluationTable(evaluations, about.card.is_graded)] : null,
        h("h2", {}, "Plugins"), usedTable(provenance.used || []),
        h("h2", {}, "Environment"), tableOf(flat(Object.fromEntries(Object.entries(provenance).filter(([name]) => name !== "used")))))));
  }
  await draw();
  return { tick: draw, keys: {} };
}

/** Curves of several runs in the same axes, and the settings in which they differ. */
export async function comparePage(main, names) {
  const table = h("section.page"), curves = h("div");
  fill(main, table, curves);
  const abouts = await Promise.all(names.map((name) => source.about(name)));
  const settings = abouts.map((about) => new Map(flat(about.settings)));
  const keys = [...new Set(settings.flatMap((one) => [...one.keys()]))];
  const differing = keys.filter((key) => new Set(settings.map((one) => String(one.get(key) ?? ""))).size > 1);
  fill(table,
    h("h1", {}, "Comparison"),
    h("div.wide-table", {}, h("table.differences", {},
      h("thead", {}, h("tr", {}, h("th"), names.map((name, i) => h(`th.c${i % 8}`, {}, h("i.swatch"), " ", shown(name))))),
      h("tbody", {},
        h("tr", {}, h("th", {}, "step"), abouts.map((a) => h("td", {}, number(a.card.step)))),
        h("tr", {}, h("th", {}, "reward"), abouts.map((a) => h("td", {}, fixed(a.card.reward)))),
        h("tr", {}, h("th", {}, abouts.some((a) => a.card.is_graded) ? "held out (mean reward where rewards are graded)" : "held out"), abouts.map((a) => h("td", {}, fixed(a.card.heldout.at(-1))))),
        h("tr", {}, h("th", {}, "training"), abouts.map((a) => h("td", {}, seconds(a.card.train_s)))),
        differing.map((key) => h("tr", {}, h("th", {}, shown(key)), settings.map((one) => h("td", {}, shown(String(one.get(key) ?? "–"))))))))),
    differing.length ? null : h("p.hint", {}, "All settings are the same."));
  return curvesPage(curves, names);
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object") return [[prefix, value]];
  if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object")) return [[prefix, value.join(", ")]];
  return Object.entries(value).flatMap(([key, item]) => flat(item, prefix ? `${prefix}.${key}` : key));
}

function tableOf(pairs) {
  return h("table.pairs", {}, pairs.map(([name, value]) => h("tr", {}, h("th", {}, shown(name)),
    h("td", {}, value === null || value === "" ? h("span.nothing", {}, "–") : shown(typeof value === "number" ? number(value, 6) : String(value))))));
}

function usedTable(used) {
  return h("div.wide-table", {}, h("table.pairs", {}, used.map((entry) => h("tr", {}, h("th", {}, shown(entry.kind)),
    h("td", {}, h("b", {}, shown(entry.id)), " ", h("small", {}, shown(entry.summary))), h("td", {}, shown(`${entry.distribution} ${entry.version}`))))));
}

function evaluationTable(evaluations, isGraded) {
  const measure = isGraded ? "reward" : "pass@1";
  const cell = (row, kind) => row[kind]?.[measure] ?? row.heldout?.[kind === "sampled" ? "accuracy" : "loss"];
  return h("table.pairs", {}, h("tr", {}, h("th", {}, "step"), h("td", {}, isGraded ? "mean reward, sampled" : "sampled"), h("td", {}, isGraded ? "greedy" : "greedy / loss")),
    evaluations.map((row) => h("tr", {}, h("th", {}, number(row.step)), h("td", {}, number(cell(row, "sampled"))), h("td", {}, number(cell(row, "greedy"))))));
}
