// One trajectory: its head, and the tabs.
import { h, fill, number, signed, shown } from "./dom.js";
import { source } from "./source.js";
import { messagesTab, roleOf } from "./messages.js";
import { tokensTab } from "./tokens.js";
import { timelineTab } from "./timeline.js";
import { siblingsTab } from "./siblings.js";

export const TABS = ["messages", "tokens", "timeline", "siblings", "raw"];

const DRAW = { messages: messagesTab, tokens: tokensTab, timeline: timelineTab, siblings: siblingsTab, raw: rawTab };

/** The right half of the page. */
export class TrajectoryView {
  #key = null;
  #reading = null;
  #trajectory = null;

  constructor(onTab, onOpen, onClose, onQuery, detail = (run, file, place) => source.detail(run, file, place)) {
    Object.assign(this, { onTab, onOpen, onClose, onQuery, detail });
    this.element = h("section.right", { "aria-label": "trajectory" });
    this.#empty();
  }

  /** Begin to read the trajectory at `place` of a file; null is none. */
  expect(run, file, place) {
    const key = place === null ? null : `${run}\n${file}\n${place}`;
    if (key === this.#key && key !== null) return;
    this.#key = key;
    if (key === null) {
      this.#empty();
      return;
    }
    this.#reading = this.detail(run, file, place);
    this.#reading.catch(() => {}); // `open` reports the error
  }

  /** Show the trajectory at `place` of a file; nothing when it is null. */
  async open(run, file, place, tab, rows, query) {
    this.expect(run, file, place);
    if (place === null) return;
    const key = this.#key;
    const trajectory = await this.#reading;
    if (this.#key !== key) return; // another one was opened meanwhile
    this.#trajectory = trajectory;
    this.#draw({ run, file, tab: DRAW[tab] ? tab : "messages", rows, query });
  }

  #empty() {
    fill(this.element, h("p.empty", {}, "Select a trajectory: click on one, or press ", h("kbd", {}, "j"), "."));
  }

  #draw({ run, file, tab, rows, query }) {
    const trajectory = this.#trajectory;
    const row = rows[trajectory.place] || {};
    const tabs = TABS.map((name, i) => h(`button.tab${name === tab ? ".on" : ""}`, {
      title: `key ${i + 1}`, onclick: () => this.onTab(name),
    }, name));
    const body = h(`div.body.of-${tab}`);
    fill(this.element,
      h("header.head", {},
        h("div.line", {},
          h("button.icon.back", { title: "back to the list  Esc", onclick: () => this.onClose() }, "←"),
          h("b.id", {}, shown(trajectory.id)), h("span.task", {}, shown(trajectory.task.id))),
        h("div.facts", {}, factsOf(trajectory, row))),
      h("nav.tabs", {}, tabs), body);
    body.scrollTop = 0;
    DRAW[tab](body, trajectory, {
      rows, query, onOpen: this.onOpen, onQuery: this.onQuery, load: (place) => this.detail(run, file, place),
    });
  }
}

function factsOf(trajectory, row) {
  const parts = new Map();
  for (const turn of trajectory.turns) {
    for (const [name, value] of Object.entries(turn.reward_parts)) parts.set(name, (parts.get(name) || 0) + value);
  }
  const roles = new Map();
  for (const turn of trajectory.turns.filter((one) => one.role)) roles.set(roleOf(turn), (roles.get(roleOf(turn)) || 0) + turn.reward);
  const versions = trajectory.policy_versions || [];
  const facts = [
    fact("reward", number(trajectory.reward), trajectory.reward >= 1 ? "good" : trajectory.reward > 0 ? "" : "bad"),
    ...[...roles].map(([role, value]) => fact(`reward of ${role}`, number(value))),
    ...[...parts].map(([name, value]) => fact(name, number(value))),
    row.advantage === null || row.advantage === undefined ? null : fact("advantage", signed(row.advantage)),
    fact("stop reason", trajectory.stop_reason, trajectory.error ? "bad" : ""),
    fact("turns", number(trajectory.turns.length)),
    fact("tokens", `${number(trajectory.num_policy_tokens)} of ${number(trajectory.num_tokens)}`),
    versions.length ? fact("version", versions.length > 1 ? `${versions[0]}–${versions.at(-1)}` : String(versions[0])) : null,
    row.staleness ? fact("staleness", String(row.staleness)) : null,
    trajectory.num_forks ? fact("forks", String(trajectory.num_forks)) : null,
    ...Object.entries(trajectory.metrics || {}).map(([name, value]) => fact(name.replaceAll("_", " "), number(value))),
    fact("env", trajectory.env_id), fact("seed", String(trajectory.seed)),
  ];
  return [...facts, trajectory.error ? h("div.error", {}, shown(trajectory.error)) : null];
}

function fact(name, value, kind = "") {
  return h(`span.fact${kind ? `.${kind}` : ""}`, {}, h("small", {}, shown(name)), " ", shown(value));
}

function rawTab(body, trajectory) {
  const { texts, place, ...rest } = trajectory;
  const text = JSON.stringify(rest, null, 1).replace(/\[\s+(-?[\d.e+-]+(?:,\s+-?[\d.e+-]+)*)\s+\]/g, (list) => list.replace(/\s+/g, " "));
  const copy = h("button", {
    onclick: async () => {
      await navigator.clipboard.writeText(JSON.stringify(rest));
      copy.textContent = "copied";
    },
  }, "copy as JSON");
  const pre = h("pre.code", {}, shown(text.slice(0, 200000)));
  fill(body, h("div.bar", {}, copy), pre);
  if (text.length > 200000) body.append(h("p.hint", {}, `the first 200,000 of ${number(text.length)} characters; the copied JSON has all`));
}
