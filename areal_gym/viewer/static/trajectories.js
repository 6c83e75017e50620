// A step's trajectories on the left, the selected one on the right.
import { h, fill, number } from "./dom.js";
import { go, route } from "./route.js";
import { allRows, source } from "./source.js";
import { parsedFilter, rowsOf, toggled } from "./filters.js";
import { TrajectoryList } from "./list.js";
import { TABS, TrajectoryView } from "./trajectory.js";

/** The page of one run. */
export async function trajectoriesPage(main, run) {
  const list = new TrajectoryList({ onOpen: (place) => open(place), onSort: sortBy, onFold: () => show() });
  const view = new TrajectoryView((tab) => open(state.place, tab), (place) => open(place), () => open(null), setQuery);
  const steps = h("select.steps", { "aria-label": "step", onchange: () => toFile(steps.value) });
  const older = h("button.icon", { title: "earlier step  [", onclick: () => toStep(-1) }, "‹");
  const newer = h("button.icon", { title: "later step  ]", onclick: () => toStep(1) }, "›");
  const follow = h("button.toggle", { title: "go to each new step", onclick: () => toFile(state.file === "latest" ? file : "latest") }, "follow");
  const grouping = h("button.toggle", { title: "group siblings  g", onclick: () => setQuery({ flat: state.query.flat ? "" : "1" }) }, "groups");
  const filter = h("input.filter", {
    type: "search", placeholder: "filter:  reward<1  stop:max_tokens  is:mixed  words", "aria-label": "filter", spellcheck: false,
    oninput: () => { clearTimeout(typing); typing = setTimeout(() => setQuery({ q: filter.value.trim() }), 150); },
    onkeydown: (event) => { if (event.key === "Enter" || event.key === "Escape") { filter.blur(); list.scroller.focus(); event.preventDefault(); event.stopPropagation(); } },
  });
  const chips = h("div.chips"), count = h("span.count");
  const left = h("section.left", {},
    h("div.bar", {}, older, steps, newer, source.isLive ? follow : null, grouping, h("span.spring"), count),
    h("div.bar", {}, filter), chips, list.element);
  const page = h("div.split", {}, left, view.element);
  fill(main, page);

  let about = await source.about(run);
  let state = {}, file = null, rows = [], typing = null, searched = { key: "", places: null };
  let shownFile = null, isReading = false;

  function read() {
    const { path, query } = route();
    const place = path[4] === undefined ? null : Number(path[4]);
    state = { file: path[3] || "latest", place: Number.isInteger(place) ? place : null, tab: path[5] || "messages", query };
  }

  async function follows() {
    read();
    file = state.file === "latest" ? latest(about.files) : state.file;
    drawSteps();
    if (file === null) {
      fill(list.space, h("p.empty", {}, about.card.status === "running" ? "No trajectories yet; this page follows the run." : "This run has no trajectories."));
      return;
    }
    if (document.activeElement !== filter) filter.value = state.query.q || "";
    page.classList.toggle("is-open", state.place !== null);
    page.classList.toggle("is-broad", state.place !== null && state.tab === "siblings");
    view.expect(run, file, state.place);
    if (shownFile !== file) await load();
    await show();
    list.select(state.place);
    await view.open(run, file, state.place, state.tab, rows, state.query);
  }

  async function load() {
    const wanted = file;
    shownFile = wanted;
    isReading = true;
    fill(count, "loading …");
    let isFirst = true;
    await allRows(run, wanted, (columns, isWhole) => {
      if (file !== wanted) return;
      rows = rowsOf(columns);
      isReading = !isWhole;
      if (isFirst && !isWhole) show();
      isFirst = false;
    });
  }

  async function show() {
    const line = state.query.q || "";
    const { tests, text } = parsedFilter(line);
    const key = `${file}\n${text}`;
    if (text && searched.key !== key) {
      searched = { key, places: null };
      searched.places = new Set(await source.search(run, file, text));
    }
    const places = text ? searched.places : null;
    const found = rows.filter((row) => tests.every((test) => test(row)) && (places === null || places.has(row.place)));
    const isGrouped = !state.query.flat && hasGroups(rows);
    grouping.classList.toggle("on", isGrouped);
    grouping.hidden = !hasGroups(rows);
    list.show(found, { sort: state.query.sort || "place", isGrouped, all: rows });
    fill(count, found.length === rows.length ? number(rows.length) : `${number(found.length)} of ${number(rows.length)}`, isReading ? " …" : "");
    drawChips(line);
  }

  function drawChips(line) {
    const counts = new Map();
    const add = (term) => counts.set(term, (counts.get(term) || 0) + 1);
    for (const row of rows) {
      add(`stop:${row.stop}`);
      add(`env:${/\s/.test(row.env) ? `"${row.env.replaceAll('"', "")}"` : row.env}`);
      add(row.reward >= 1 - 1e-9 ? "is:solved" : "is:unsolved");
      if (row.staleness > 0) add("is:stale");
      if (row.error) add("is:failed");
      if (row.forks > 0) add("is:forked");
      if (row.isMixed) add("is:mixed");
    }
    const useful = [...counts].filter(([term, n]) => n < rows.length || line.includes(term));
    const order = ["is:solved", "is:unsolved", "is:mixed", "is:stale", "is:failed", "is:forked"];
    const rank = ([term]) => (order.indexOf(term) + order.length + 1) % (order.length + 1);
    useful.sort((a, b) => rank(b) - rank(a) === 0 ? b[1] - a[1] : rank(a) - rank(b));
    fill(chips, useful.map(([term, n]) => h(`button.chip${line.includes(term) ? ".on" : ""}`, {
      onclick: () => setQuery({ q: toggled(line, term) }),
    }, term.replace(/^is:/, "").replace(/^stop:|^env:/, ""), " ", h("small", {}, number(n)))));
  }

  function drawSteps() {
    const names = about.files;
    fill(steps, names.map((name) => h("option", { value: name, selected: name === file }, labelOf(name))));
    older.disabled = names.indexOf(file) <= 0;
    newer.disabled = names.indexOf(file) >= names.length - 1;
    follow.classList.toggle("on", state.file === "latest");
    follow.hidden = about.card.status !== "running";
  }

  function open(place, tab = state.tab) {
    const path = ["run", run, "trajectories", state.file];
    if (place !== null && place !== undefined) path.push(String(place), ...(tab === "messages" ? [] : [tab]));
    go(path, state.query, state.place !== null && place !== null);
  }

  function setQuery(changes) {
    const path = ["run", run, "trajectories", state.file];
    if (state.place !== null) path.push(String(state.place), ...(state.tab === "messages" ? [] : [state.tab]));
    go(path, { ...state.query, ...changes }, true);
  }

  function sortBy(key) {
    const now = state.query.sort || "place";
    const first = key === "place" || key === "stop" || key === "preview" ? key : `-${key}`;
    const other = first.startsWith("-") ? key : `-${key}`;
    setQuery({ sort: now === first ? other : first });
  }

  function toFile(name) {
    go(["run", run, "trajectories", name], { ...state.query }, true);
  }

  function toStep(by) {
    const next = about.files[about.files.indexOf(file) + by];
    if (next) toFile(next);
  }

  function move(by) {
    return () => {
      const place = list.neighbour(by);
      if (place !== null) open(place);
    };
  }

  await follows();
  return {
    async route() { await follows(); },
    async tick() {
      about = await source.about(run);
      if (state.file === "latest" && latest(about.files) !== file) await follows();
      else drawSteps();
    },
    keys: {
      j: move(1), ArrowDown: move(1), k: move(-1), ArrowUp: move(-1),
      "[": () => toStep(-1), "]": () => toStep(1),
      "/": () => { filter.focus(); filter.select(); },
      g: () => setQuery({ flat: state.query.flat ? "" : "1" }),
      f: () => { list.foldAll(); show(); },
      Escape: () => open(null),
      ...Object.fromEntries(TABS.map((tab, i) => [String(i + 1), () => state.place !== null && open(state.place, tab)])),
    },
  };
}

function hasGroups(rows) {
  return rows.length > 1 && new Set(rows.map((row) => row.group)).size < rows.length;
}

function latest(files) {
  return files.filter((name) => name.startsWith("step-")).at(-1) || files.at(-1) || null;
}

function labelOf(name) {
  const [, kind, digits] = name.match(/^(step|eval)-0*(\d+)$/) || [];
  return kind ? `${kind === "step" ? "step" : "held out, step"} ${digits}` : name;
}
