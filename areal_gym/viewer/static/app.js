// The page as a whole: header, routes, keys, and polling for changes of a running run.
import { h, fill, number, shown } from "./dom.js";
import { address, go, route } from "./route.js";
import { source } from "./source.js";
import { FILTER_HELP } from "./filters.js";
import { RUN_FILTER_HELP, runsPage } from "./runs.js";
import { curvesPage } from "./curves.js";
import { trajectoriesPage } from "./trajectories.js";
import { comparePage, settingsPage } from "./about.js";
import { evaluationPage } from "./evaluation.js";
import { evaluationsPage, sideBySidePage } from "./evals.js";
import { SAMPLE_FILTER_HELP } from "./samples.js";
import { termOf } from "./listpage.js";

const PULSE_MS = 1500;
const VIEWS = ["curves", "trajectories", "settings"];
const KEYS = [
  ["j k ↓ ↑", "next, previous"], ["[ ]", "earlier, later step"], ["1 to 5", "messages, tokens, timeline, siblings, raw"],
  ["/", "filter"], ["g", "group siblings or not"], ["f", "fold all groups"], ["Enter", "open a run"], ["e x", "tags, note and deletion of a run; select it to compare"],
  ["c t s", "curves, trajectories, settings"], ["r v", "all runs, all evaluations"], ["d", "theme: dark, light, system"], ["Esc", "close"], ["?", "this help"],
];

const bar = h("header.top"), main = h("main"), trouble = h("div.trouble", { hidden: true, role: "alert" });
const help = h("dialog.help", { onclick: (event) => event.target === help && help.close() });

let page = null, shownKey = null, turn = 0, seen = "";

async function follow() {
  const { path, query } = route();
  const [place, run, view = "curves"] = path;
  const key = { compare: `compare ${query.runs}`, run: `run ${run} ${view}`, eval: `eval ${run}`, evals: run === "compare" ? `evals ${query.ids}` : "evals" }[place] ?? "runs";
  const mine = ++turn;
  try {
    if (key === shownKey && page) {
      await page.route?.();
    } else {
      page?.close?.();
      page = null;
      shownKey = key;
      seen = await heard(path); // before the page reads: what comes in between is noticed
      const bar = drawBar(place === "run" ? run : null, view, place);
      const made = await pageOf(place, run, view, query);
      await bar;
      if (mine !== turn && key !== shownKey) made.close?.();
      else page = made;
    }
    trouble.hidden = true;
  } catch (error) {
    complain(error);
  }
}

function pageOf(place, run, view, query) {
  if (place === "compare") return comparePage(main, (query.runs || "").split(",").filter(Boolean));
  if (place === "eval") return evaluationPage(main, run);
  if (place === "evals") return run === "compare" ? sideBySidePage(main, idsIn(query.ids)) : evaluationsPage(main);
  if (place !== "run") return runsPage(main);
  if (view === "trajectories") return trajectoriesPage(main, run);
  return view === "settings" ? settingsPage(main, run) : curvesPage(main, [run]);
}

/** The ids in an address; none if it was cut off. */
function idsIn(text) {
  try {
    return JSON.parse(text).map(String);
  } catch {
    return [];
  }
}

async function drawBar(run, view, place) {
  const card = run === null ? null : (await source.about(run)).card;
  const isEval = place === "eval" || place === "evals";
  document.title = run === null ? "areal-gym" : `${run} · areal-gym`;
  fill(bar,
    h("a.brand", { href: "#/", title: "all runs  r" }, "areal-gym"),
    card ? h("span.run-name", {}, h(`i.state.${card.status}`, { title: [card.status, card.error].filter(Boolean).join(": ") }), shown(card.name)) : null,
    card ? null : h("nav", {}, h(`a${isEval ? "" : ".on"}`, { href: "#/" }, "runs"), h(`a${isEval ? ".on" : ""}`, { href: "#/evals", title: "all evaluations  v" }, "evaluations")),
    card ? h("nav", {}, VIEWS.map((name) => h(`a${name === view ? ".on" : ""}`, { href: address(["run", run, name]) }, name)), h("a", { href: address(["evals"], { q: termOf("run", run) }) }, "evaluations")) : null,
    h("span.spring"),
    card ? h("span.progress", {}, card.status === "running" ? "live, " : card.status === "finished" ? "" : `${card.status}, `, `step ${number(card.step)} of ${number(card.steps)}`) : null,
    h("button.icon", { title: "dark or light theme  d", onclick: turnTheme }, "◐"),
    h("button.icon", { title: "keys and filters  ?", onclick: () => openHelp() }, "?"));
}

/** The server's state of what is shown, to be compared with its next answer. */
async function heard(path) {
  if (!source.isLive || path[0] !== "run") return "";
  return JSON.stringify(await source.pulse(path[1]));
}

async function pulse() {
  if (source.isLive && !document.hidden && page) {
    const { path } = route();
    const mine = page;
    try {
      const now = await heard(path);
      if (mine.isPolled && mine === page) await mine.tick();
      if (now !== seen && mine === page) {
        seen = now;
        await page.tick();
        await drawBar(path[0] === "run" ? path[1] : null, path[2] || "curves", path[0]);
      }
      trouble.hidden = true;
    } catch (error) {
      complain(error);
    }
  }
  setTimeout(pulse, PULSE_MS);
}

function complain(error) {
  fill(trouble, shown(error.message));
  trouble.hidden = false;
}

function openHelp() {
  const pairs = (all) => h("dl", {}, all.map(([name, what]) => [h("dt", {}, name), h("dd", {}, what)]));
  fill(help,
    h("form", { method: "dialog" }, h("h2", {}, "Keys"), h("button", {}, "close")), pairs(KEYS),
    h("h2", {}, "Filters of trajectories"), pairs(FILTER_HELP),
    h("h2", {}, "Filters of samples"), pairs(SAMPLE_FILTER_HELP),
    h("h2", {}, "Search of runs"), pairs(RUN_FILTER_HELP));
  help.showModal();
}

function turnTheme() {
  const next = { "": "dark", dark: "light", light: "" }[document.documentElement.dataset.theme || ""];
  setTheme(next);
  try { localStorage.setItem("areal-gym-theme", next); } catch { /* a page from a file may have none */ }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) return;
  const { path } = route();
  const run = path[0] === "run" ? path[1] : null;
  const own = page?.keys?.[event.key];
  const common = {
    "?": openHelp, d: turnTheme, r: () => go([]), v: () => go(["evals"]),
    ...(run === null ? {} : { c: () => go(["run", run, "curves"]), t: () => go(["run", run, "trajectories"]), s: () => go(["run", run, "settings"]) }),
  }[event.key];
  if (!own && !common) return;
  event.preventDefault();
  (own || common)();
});
window.addEventListener("hashchange", follow);
window.addEventListener("unhandledrejection", (event) => { event.preventDefault(); complain(event.reason); });

try { setTheme(localStorage.getItem("areal-gym-theme") || ""); } catch { setTheme(""); }
document.body.append(bar, trouble, main, help);
await follow();
setTimeout(pulse, PULSE_MS);
