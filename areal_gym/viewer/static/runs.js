// The list of runs.
import { h, fill, fixed, number, shown } from "./dom.js";
import { address, go } from "./route.js";
import { source } from "./source.js";
import { spark } from "./charts.js";

/** The page; `main` is where it goes. */
export async function runsPage(main) {
  const chosen = new Set();
  let cards = [], current = 0;
  const compare = h("a.button", {}, "compare");
  const table = h("div.runs");
  fill(main, h("div.page", {}, h("div.bar", {}, h("h1", {}, "Runs"), h("span.spring"), compare), table));

  function draw() {
    compare.hidden = cards.length < 2;
    compare.href = address(["compare"], { runs: [...chosen].join(",") });
    compare.classList.toggle("off", chosen.size < 2);
    compare.textContent = chosen.size < 2 ? "select two runs to compare them" : `compare ${chosen.size} runs`;
    fill(table, cards.map((card, i) => runCard(card, i === current, chosen, draw)));
  }

  async function load() {
    cards = (await source.runs()).sort((a, b) => b.changed_s - a.changed_s);
    draw();
  }

  await load();
  const move = (by) => () => {
    current = Math.max(0, Math.min(cards.length - 1, current + by));
    draw();
    table.children[current].scrollIntoView({ block: "nearest" });
  };
  return {
    tick: load,
    keys: {
      j: move(1), ArrowDown: move(1), k: move(-1), ArrowUp: move(-1),
      Enter: () => go(["run", cards[current].name, "curves"]),
    },
  };
}

/** The first and the newest measurement; one alone is no change. */
function heldoutOf(measured) {
  const ends = measured.length > 1 ? [measured[0], measured.at(-1)] : measured;
  return ends.length ? ends.map(fixed).join(" → ") : "–";
}

function runCard(card, isCurrent, chosen, redraw) {
  const box = h("input", {
    type: "checkbox", checked: chosen.has(card.name), "aria-label": `compare ${card.name}`,
    onchange: () => {
      if (box.checked) chosen.add(card.name); else chosen.delete(card.name);
      redraw();
    },
  });
  return h(`div.run${isCurrent ? ".current" : ""}`, {},
    h("label.tick", {}, box),
    h("a.name", { href: address(["run", card.name, "curves"]) }, h(`i.state.${card.status}`, { title: [card.status, card.error].filter(Boolean).join(": ") }), shown(card.name),
      card.problems?.length ? h("small", { title: card.problems.join("\n") }, " ⚠ damaged") : null),
    h("span.what", {}, shown([card.env, card.objective === "rl" ? card.algorithm : card.objective, card.model].filter(Boolean).join(" · "))),
    h("span.num", {}, `step ${number(card.step)}`, h("small", {}, ` / ${number(card.steps)}`)),
    h("span.spark", { title: "mean reward" }, spark(card.rewards)),
    h("span.num", {}, h("small", {}, "reward "), fixed(card.reward)),
    h("span.num.heldout", {}, h("small", {}, "held out "),
      heldoutOf(card.heldout)));
}
