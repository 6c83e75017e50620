// The time of an episode, turn by turn: engine, tools, the rest of the environment.
import { h, fill, number, seconds, signed } from "./dom.js";

/** Draw the bars. */
export function timelineTab(body, trajectory) {
  const turns = trajectory.turns.map((turn, i) => ({
    ...turn, place: i, tool: turn.tool_s || 0, env: Math.max(0, turn.env_s - (turn.tool_s || 0)),
    tokens: trajectory.spans.filter((span) => span.turn === i && span.origin === "policy").reduce((n, span) => n + span.token_ids.length, 0),
  }));
  const total = turns.reduce((sum, turn) => sum + turn.engine_s + turn.env_s, 0);
  if (!turns.length || total === 0) {
    fill(body, h("p.empty", {}, "This episode has no turns."));
    return;
  }
  let start = 0;
  const rows = turns.map((turn) => {
    const bars = [["engine", turn.engine_s], ["tool", turn.tool], ["env", turn.env]].filter(([, time]) => time > 0).map(([kind, time]) => {
      const bar = h(`span.bar-of.${kind}`, { title: `${kind} ${seconds(time)}`, style: { left: `${(start / total) * 100}%`, width: `${(time / total) * 100}%` } });
      start += time;
      return bar;
    });
    return h("tr", {}, h("th", {}, turn.role ? `${turn.place + 1} ${turn.role}` : String(turn.place + 1)), h("td.track", {}, h("div", {}, bars)),
      h("td", {}, seconds(turn.engine_s)), h("td", {}, turn.tool ? seconds(turn.tool) : "–"), h("td", {}, seconds(turn.env)),
      h("td", {}, number(turn.tokens)), h("td", {}, turn.engine_s > 0 ? number(turn.tokens / turn.engine_s) : "–"),
      h("td", {}, turn.finish_reason), h("td", {}, turn.reward ? signed(turn.reward) : ""));
  });
  const sum = (key) => turns.reduce((all, turn) => all + turn[key], 0);
  fill(body,
    h("div.shares", {}, [["engine", sum("engine_s")], ["tool", sum("tool")], ["env", sum("env")]].filter(([, time]) => time > 0).map(([kind, time]) =>
      h("span", {}, h(`i.swatch.${kind}`), ` ${kind} `, h("b", {}, seconds(time)), ` ${number((time / total) * 100, 2)}%`)),
      h("span", {}, "total ", h("b", {}, seconds(total)))),
    h("div.wide-table", {}, h("table.timeline", {},
      h("thead", {}, h("tr", {}, ["turn", "", "engine", "tool", "env", "tokens", "tok/s", "finish reason", "reward"].map((name) => h("th", {}, name)))),
      h("tbody", {}, rows))),
    h("p.hint", {}, "Wall time, including time in the engine's queue. Tool time is known where the environment calls tools as tools."));
}
