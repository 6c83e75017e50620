// A filter of trajectories in one line: `reward<1 stop:max_tokens is:stale some words`.

const NUMBERS = {
  reward: "reward", adv: "advantage", advantage: "advantage", turns: "turns", tokens: "tokens",
  stale: "staleness", staleness: "staleness", forks: "forks", time: "time", place: "place",
};
const WORDS = { stop: "stop", env: "env", task: "task", group: "group", id: "id", error: "error" };
const KINDS = {
  solved: (row) => row.reward >= 1 - 1e-9,
  unsolved: (row) => row.reward < 1 - 1e-9,
  stale: (row) => row.staleness > 0,
  failed: (row) => Boolean(row.error),
  truncated: (row) => ["max_turns", "max_tokens", "truncated"].includes(row.stop),
  forked: (row) => row.forks > 0,
  mixed: (row) => row.isMixed,
};

/** For the help page. */
export const FILTER_HELP = [
  ["reward<1", "also adv, turns, tokens, stale, forks, time, place; with < <= > >= ="],
  ["stop:max_tokens", "also env:, task:, group:, id:, error:; a substring is enough"],
  ["is:mixed", `rewards differ within the group; also ${Object.keys(KINDS).filter((kind) => kind !== "mixed").map((kind) => `is:${kind}`).join(", ")}`],
  ["-stop:completed", "a minus excludes them"],
  ["any words", "in the messages, the task, the error"],
];

/** The terms that trajectories are filtered by; other lists have their own. */
const TRAJECTORY_TERMS = { numbers: NUMBERS, words: WORDS, kinds: KINDS };

/** {tests: [row => bool], text}: what the line asks of a row, and of the dialogue's text. */
export function parsedFilter(line, terms = TRAJECTORY_TERMS) {
  const tests = [], text = [];
  for (const term of line.match(/\S*"[^"]*"|\S+/g) || []) {
    const test = testOf(term, terms);
    if (test) tests.push(test);
    else text.push(term.replaceAll('"', ""));
  }
  return { tests, text: text.join(" ") };
}

function testOf(term, { numbers, words, kinds }) {
  const compared = term.match(/^(-?)([a-z]+)(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)$/);
  if (compared && Object.hasOwn(numbers, compared[2])) {
    const [, minus, name, operator, digits] = compared;
    const key = numbers[name], limit = Number(digits);
    return negated(minus, (row) => row[key] !== null && row[key] !== undefined && {
      "<": row[key] < limit, "<=": row[key] <= limit, ">": row[key] > limit, ">=": row[key] >= limit, "=": row[key] === limit,
    }[operator]);
  }
  const named = term.match(/^(-?)([a-z]+):(.+)$/);
  if (!named) return null;
  const [, minus, name, raw] = named;
  const value = raw.replaceAll('"', "");
  if (name === "is" && Object.hasOwn(kinds, value)) return negated(minus, kinds[value]);
  if (!Object.hasOwn(words, name)) return null;
  return negated(minus, (row) => String(row[words[name]] || "").toLowerCase().includes(value.toLowerCase()));
}

function negated(minus, test) {
  return minus ? (row) => !test(row) : test;
}

/** The line with a term added, or without it when it was there. */
export function toggled(line, term) {
  const terms = line.match(/\S*"[^"]*"|\S+/g) || [];
  return (terms.includes(term) ? terms.filter((t) => t !== term) : [...terms, term]).join(" ");
}

/** Columns as rows: [{place, id, group, ...}]. */
export function rowsOf(columns) {
  const names = Object.keys(columns).filter((name) => name !== "length");
  const rows = [];
  for (let i = 0; i < columns.length; i++) {
    const row = { place: i };
    for (const name of names) row[name] = columns[name][i];
    row.time = row.engine_s + row.env_s;
    rows.push(row);
  }
  const best = new Map(), worst = new Map();
  for (const row of rows) {
    best.set(row.group, Math.max(best.get(row.group) ?? -Infinity, row.reward));
    worst.set(row.group, Math.min(worst.get(row.group) ?? Infinity, row.reward));
  }
  for (const row of rows) row.isMixed = best.get(row.group) > worst.get(row.group);
  return rows;
}
