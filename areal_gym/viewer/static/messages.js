// The dialogue: messages, tool calls with their results, time and reward of each turn.
import { h, fill, folded, number, seconds, signed, shown } from "./dom.js";

/** Draw the dialogue. */
export function messagesTab(body, trajectory) {
  fill(body, dialogue(trajectory), taskBox(trajectory));
}

/** All messages as elements; `from` leaves out the first ones. */
export function dialogue(trajectory, from = 0) {
  const turnOf = turnsByMessage(trajectory);
  return trajectory.messages.map((message, i) => (i < from ? null : messageBox(message, turnOf.get(i), trajectory.pictureOf)));
}

function messageBox(message, turn, pictureOf) {
  const label = message.role === "tool" && message.name ? `tool · ${message.name}` : turn?.turn.role ? `${message.role} · ${roleOf(turn.turn)}` : message.role;
  const isLong = message.role === "system" && (message.content || "").length > 400;
  return h(`article.message.${kindOf(message.role)}`, {},
    h("header", {}, shown(label), turn ? turnFacts(turn) : null),
    message.reasoning_content ? h("div.reasoning", {}, folded(message.reasoning_content, 1500)) : null,
    contentOf(message.content, isLong ? 300 : undefined, pictureOf),
    (message.tool_calls || []).map(callBox),
    message.parse_error ? h("div.error", {}, shown(`malformed call: ${message.parse_error}`)) : null,
    !message.content && !message.tool_calls?.length && !message.reasoning_content ? h("div.text.nothing", {}, "empty") : null);
}

// A content is a text, or a list of texts and pictures.
function contentOf(content, limit, pictureOf) {
  if (!Array.isArray(content)) return content ? folded(content, limit) : null;
  return content.map((part) => {
    if (part.type !== "image") return folded(String(part.text || ""), limit);
    const name = `[image ${part.width}x${part.height} ${String(part.sha256).slice(0, 4)}]`;
    const url = /^[0-9a-f]{64}$/.test(part.sha256) ? pictureOf?.(part.sha256) : null;
    if (!url) return h("div.text", {}, shown(name));
    return h("img.picture", { src: url, alt: name, title: name, loading: "lazy" });
  });
}

function kindOf(role) {
  return ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
}

/** The role that wrote a turn, in episodes that several roles play. */
export function roleOf(turn) {
  return turn.is_fixed ? `${turn.role} (another policy)` : turn.role;
}

function turnFacts({ turn, place, advantage }) {
  const words = [`turn ${place + 1}`, seconds(turn.engine_s)];
  if (turn.env_s >= 0.0005) words.push(`+ ${seconds(turn.env_s)}`);
  if (turn.finish_reason !== "stop") words.push(turn.finish_reason);
  return h("span.turn", {}, words.join(" · "),
    turn.reward ? h(`b.${turn.reward > 0 ? "good" : "bad"}`, {}, ` ${signed(turn.reward)}`) : null, advantage);
}

function callBox(call) {
  const { name, arguments: values } = call.function;
  const entries = Object.entries(values || {});
  const box = h("div.call", {}, h("span.fn", {}, shown(name)));
  for (const [key, value] of entries) {
    const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
    const isBlock = text.length > 60 || text.includes("\n");
    box.append(h(isBlock ? "div.argument" : "span.argument", {}, h("small", {}, shown(key)), " ",
      h("code", {}, isBlock ? folded(text) : shown(text))));
  }
  return box;
}

function taskBox(trajectory) {
  const entries = Object.entries(trajectory.task.data || {});
  if (!entries.length) return null;
  return h("details.facts-of-task", {}, h("summary", {}, "task data"), h("dl", {}, entries.map(([name, value]) => [
    h("dt", {}, shown(name)),
    h("dd", {}, folded(typeof value === "string" ? value : JSON.stringify(value), 600)),
  ])));
}

// An assistant's message is a turn; messages that the environment put before are none.
function turnsByMessage(trajectory) {
  const said = trajectory.messages.map((message, i) => [message.role, i]).filter(([role]) => role === "assistant");
  const skipped = said.length - trajectory.turns.length;
  return new Map(trajectory.turns.map((turn, place) => [said[place + skipped]?.[1], { turn, place }]));
}

/** How many leading messages trajectories have in common. */
export function commonMessages(trajectories) {
  const [first, ...rest] = trajectories.map((t) => t.messages.map((m) => JSON.stringify(m)));
  let n = 0;
  while (n < first.length && rest.every((other) => other[n] === first[n])) n++;
  return n;
}

/** One line about a trajectory, for a column's head. */
export function headline(trajectory, row) {
  return [
    h(`b.${trajectory.reward >= 1 ? "good" : "bad"}`, {}, number(trajectory.reward)),
    row?.advantage === null || row?.advantage === undefined ? null : h("span", {}, ` adv ${signed(row.advantage)}`),
    h("span", {}, ` · ${trajectory.stop_reason} · ${number(trajectory.num_policy_tokens)} tokens`),
  ];
}
