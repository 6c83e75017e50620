// The trajectories of one group, side by side.
import { h, fill, shown } from "./dom.js";
import { commonMessages, dialogue, headline } from "./messages.js";

const MOST = 32;

/** Draw the group of a trajectory. */
export async function siblingsTab(body, trajectory, { rows, load, onOpen }) {
  const group = rows[trajectory.place]?.group ?? trajectory.group_id;
  const members = rows.filter((row) => row.group === group).sort((a, b) => b.reward - a.reward || a.place - b.place).slice(0, MOST);
  fill(body, h("p.empty", {}, "…"));
  const found = await Promise.all(members.map((row) => (row.place === trajectory.place ? trajectory : load(row.place))));
  const shared = found.length > 1 ? commonMessages(found) : 0;
  fill(body,
    h("div.shared", {}, dialogue({ ...found[0], messages: found[0].messages.slice(0, shared), turns: [] })),
    h("div.columns", {}, found.map((sibling, i) => h(`section.column${sibling.place === trajectory.place ? ".current" : ""}`, {},
      h("header", {}, h("button.link", { onclick: () => onOpen(sibling.place) }, shown(sibling.id)), " ", headline(sibling, members[i])),
      dialogue(sibling, shared)))));
}
