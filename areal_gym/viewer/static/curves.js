// Curves of one run, or of several in the same axes.
import { h, fill, number, seconds } from "./dom.js";
import { go } from "./route.js";
import { source } from "./source.js";
import { Chart, ChartBoard } from "./charts.js";

const share = (value) => `${number(value * 100)}%`;

/** A row of report/chart_table.py as a card: [title, hint, [[metric, label], ...], options]. */
function cardOf(spec) {
  const format = spec.unit.startsWith("share") ? { format: share } : spec.unit === "s" ? { format: seconds } : {};
  return [spec.title, spec.hint, Object.entries(spec.metrics), {
    ...format, floor: spec.floor, ceiling: spec.ceiling, least: spec.least, heldout: spec.heldout, isStacked: spec.is_stacked, areShares: spec.is_stacked, isQuiet: spec.is_quiet,
  }];
}

/** Curves of `names` (of one run: as lines of metrics; of several: as lines of runs). */
export async function curvesPage(main, names) {
  const board = new ChartBoard((step) => openStep(step));
  const grid = h("div.charts");
  const others = h("div.charts");
  const filter = h("input", { type: "search", placeholder: "name of a metric", "aria-label": "name of a metric", oninput: () => drawOthers() });
  const rest = h("details.rest", { ontoggle: () => drawOthers() }, h("summary", {}, "All metrics"), filter, others);
  const smoothing = h("select", { "aria-label": "smoothing", onchange: () => board.smooth(Number(smoothing.value)) },
    h("option", { value: "0" }, "no smoothing"), h("option", { value: "0.7" }, "smooth"), h("option", { value: "0.93" }, "very smooth"));
  const hint = names.length > 1 ? null : h("span.hint", { hidden: true }, "click a point to see its trajectories");
  fill(main, h("div.page", {}, h("div.bar", {}, h("span.spring"), hint, smoothing), grid, rest));

  let runs = [], charts = new Map(), extra = new Map();

  async function openStep(step) {
    if (names.length > 1) return;
    const file = `step-${String(step).padStart(6, "0")}`;
    const about = await source.about(names[0]);
    if (about.files.includes(file)) go(["run", names[0], "trajectories", file]);
  }

  async function load() {
    runs = await Promise.all(names.map(async (name, i) => {
      const about = await source.about(name);
      const last = runs[i]?.curves.step.at(-1) || 0;
      const after = about.card.step < last ? 0 : last; // a resumed run takes steps back
      const fresh = await source.curves(name, after);
      return { name, about, curves: after ? joined(runs[i].curves, fresh) : fresh };
    }));
    for (const spec of runs[0]?.about.charts || []) place(grid, charts, cardOf(spec));
    for (const [name, chart] of extra) chart.update(seriesOf(runs, [[name, ""]], {}));
    if (hint) hint.hidden = !runs[0].about.files.some((name) => name.startsWith("step-"));
    if (!charts.size) fill(grid, h("p.empty", {}, "No step is done yet; this page follows the run."));
  }

  function place(where, known, [title, hint, metrics, options]) {
    const series = seriesOf(runs, metrics, options);
    if (!series.length) return;
    if (options.isQuiet && series.every((line) => line.values.every((value) => !value))) return;
    if (known.has(title)) { known.get(title).update(series); return; }
    if (!known.size) fill(where);
    const chart = new Chart({ title, hint, series, ...options, isStacked: options.isStacked && names.length === 1 });
    known.set(title, chart);
    where.append(board.add(chart));
  }

  function drawOthers() {
    if (!rest.open) return;
    const every = [...new Set(runs.flatMap((run) => Object.keys(run.curves.columns)))].sort();
    const wanted = every.filter((name) => name.includes(filter.value.trim()));
    for (const chart of extra.values()) chart.forget();
    extra = new Map();
    fill(others);
    for (const name of wanted.slice(0, 150)) place(others, extra, [name, "see docs/metrics.md", [[name, ""]], {}]);
    if (!extra.size) fill(others, h("p.empty", {}, "No metric of that name."));
  }

  await load();
  return { tick: load, close: () => board.clear(), keys: {} };
}

function joined(old, fresh) {
  if (!fresh.step.length) return old;
  const columns = {};
  for (const name of new Set([...Object.keys(old.columns), ...Object.keys(fresh.columns)])) {
    columns[name] = [
      ...(old.columns[name] || old.step.map(() => null)),
      ...(fresh.columns[name] || fresh.step.map(() => null)),
    ];
  }
  return { step: [...old.step, ...fresh.step], columns };
}

function seriesOf(runs, metrics, options) {
  const lines = [];
  runs.forEach((run, place) => {
    const { step, columns } = run.curves;
    for (const [metric, label] of metrics) {
      for (const name of matching(columns, metric)) {
        if (!columns[name].some((value) => typeof value === "number")) continue;
        const isPattern = metric.endsWith("*");
        const words = (isPattern ? label + name.slice(metric.length - 1) : label || name.split("/").at(-1)).replaceAll("_", " ");
        lines.push({
          name: runs.length > 1 ? run.name + (metrics.length > 1 || isPattern ? ` ${words}` : "") : words,
          steps: step, values: columns[name],
          color: runs.length > 1 ? place % 8 : lines.length % 8,
          isDotted: runs.length > 1 && lines.some((line) => line.color === place % 8),
        });
      }
    }
    if (options.heldout) lines.push(...heldout(run, options.heldout, runs.length > 1 ? place % 8 : 1, runs.length > 1));
  });
  return lines;
}

function matching(columns, metric) {
  if (!metric.endsWith("*")) return columns[metric] ? [metric] : [];
  return Object.keys(columns).filter((name) => name.startsWith(metric.slice(0, -1)))
    .sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

/** Of graded rewards the mean reward, and for one run the share of solved tasks, too. */
function heldout(run, name, color, isOneOfMany) {
  if (name !== "sampled") return measured(run, ["heldout", name], "held out", color, isOneOfMany);
  if (!run.about.card.is_graded) return measured(run, ["sampled", "pass@1"], "held out", color, isOneOfMany);
  return [...measured(run, ["sampled", "reward"], "held-out reward", color, isOneOfMany),
    ...(isOneOfMany ? [] : measured(run, ["sampled", "pass@1"], "solved", color + 1, false))];
}

function measured(run, [part, measure], label, color, isOneOfMany) {
  const rows = run.about.evaluations.filter((row) => typeof row[part]?.[measure] === "number");
  if (!rows.length) return [];
  const column = (key) => rows.map((row) => row[part][key]);
  const interval = part === "sampled" ? { low: column(`${measure}_low`), high: column(`${measure}_high`) } : {};
  return [{
    name: isOneOfMany ? `${run.name} ${label}` : label, color, areDots: true,
    steps: rows.map((row) => row.step), values: column(measure), ...interval,
  }];
}
