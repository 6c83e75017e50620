// The exact tokens that the engine saw and sampled, colored by what is recorded about them.
import { h, fill, number, signed, shown } from "./dom.js";

const COLORINGS = [
  ["origin", "author of the token"],
  ["log-probability", "when it was sampled; darker is less likely"],
  ["ratio", "trainer / sampler; blue is more likely now, red is less likely"],
  ["advantage", "green is positive, red is negative"],
  ["version", "policy version that sampled it"],
  ["teacher", "teacher / sampler"],
];
const BLOCK = 400;

/** Draw the tokens, colored as the address says. */
export function tokensTab(body, trajectory, { query, onQuery }) {
  const tokens = tokensOf(trajectory);
  const readout = h("div.readout", {}, "hover over a token");
  const legend = h("span.legend");
  const text = h("div.token-text", {
    onpointerover: (event) => {
      const place = event.target.closest("[data-t]")?.dataset.t;
      if (place !== undefined) fill(readout, described(tokens[place]));
    },
    onclick: (event) => {
      text.querySelector(".picked")?.classList.remove("picked");
      const element = event.target.closest("[data-t]");
      element?.classList.add("picked");
      if (element) fill(readout, described(tokens[element.dataset.t]));
    },
  });
  const known = COLORINGS.filter(([name]) => isKnown(name, tokens));
  const wanted = query.color || query.tint; // "tint" is its old name
  const chosen = known.some(([name]) => name === wanted) ? wanted : "origin";
  const select = h("select", { "aria-label": "color by", onchange: () => onQuery({ tint: "", color: select.value === "origin" ? "" : select.value }) },
    known.map(([name]) => h("option", { value: name, selected: name === chosen }, name)));

  function draw() {
    const coloring = coloringBy(chosen, tokens);
    fill(legend, COLORINGS.find(([name]) => name === chosen)[1], " ", coloring.keys);
    const blocks = [];
    let branch = null;
    for (let start = 0; start < tokens.length; start += BLOCK) {
      const block = h("span.block");
      for (const token of tokens.slice(start, start + BLOCK)) {
        if (token.isFolded) continue;
        if (token.branch !== branch) {
          if (branch !== null) block.append(h("div.fork", {}, `branch ${token.branch}: the history was rewritten`));
          branch = token.branch;
        }
        block.append(tokenMark(token, coloring));
      }
      blocks.push(block);
    }
    fill(text, blocks);
  }

  const isReadable = Object.keys(trajectory.texts || {}).length > 0;
  fill(body,
    h("div.bar.sticky", {}, h("label", {}, "color by ", select), legend, readout),
    isReadable ? null : h("p.hint", {}, "No tokenizer is recorded with this run, so ids are shown."),
    text);
  draw();
}

function tokensOf(trajectory) {
  const { texts = {}, trained } = trajectory;
  const tokens = [];
  let sampled = 0;
  for (const span of trajectory.spans) {
    const images = span.images || [];
    span.token_ids.forEach((id, i) => {
      const image = images.find((one) => one.start <= i && i < one.start + one.length);
      const isSampled = span.origin === "policy";
      const now = isSampled && trained ? trained.logprobs[sampled] : undefined;
      const old = span.logprobs ? span.logprobs[i] : undefined;
      tokens.push({
        place: tokens.length, id, isFolded: image !== undefined && image.start < i,
        text: image ? `[${image.length} × image ${String(image.sha256).slice(0, 4)}]` : texts[id], origin: span.origin, turn: span.turn, branch: span.branch, role: trajectory.turns[span.turn]?.role,
        version: span.policy_version, logprob: old, now,
        gap: now === undefined || old === undefined ? undefined : now - old,
        advantage: isSampled && trained ? trained.advantages[sampled] : undefined,
        teacher: span.teacher_logprobs ? span.teacher_logprobs[i] - old : undefined,
      });
      if (isSampled) sampled++;
    });
  }
  return tokens;
}

function isKnown(name, tokens) {
  const key = { "log-probability": "logprob", ratio: "gap", advantage: "advantage", teacher: "teacher", version: "logprob" }[name];
  return !key || tokens.some((token) => token[key] !== undefined);
}

function coloringBy(name, tokens) {
  if (name === "origin") {
    const kinds = ["prompt", "policy", "env"].filter((kind) => tokens.some((token) => token.origin === kind));
    return { of: (token) => ({ kind: token.origin }), keys: kinds.map((kind) => h(`i.swatch.${kind}`, {}, kind)) };
  }
  if (name === "version") {
    const versions = [...new Set(tokens.filter((t) => t.version !== null).map((t) => t.version))].sort((a, b) => a - b);
    return {
      of: (token) => (token.version === null ? {} : { kind: `v${versions.indexOf(token.version) % 6}` }),
      keys: versions.map((version, i) => h(`i.swatch.v${i % 6}`, {}, String(version))),
    };
  }
  if (name === "log-probability") {
    return { of: (token) => ({ kind: "unlikely", strength: token.logprob === undefined ? 0 : Math.min(1, -token.logprob / 4) }), keys: [] };
  }
  const key = name === "ratio" ? "gap" : name;
  const largest = Math.max(1e-9, ...tokens.map((token) => Math.abs(token[key] || 0)));
  const scale = name === "ratio" || name === "teacher" ? Math.max(0.05, Math.min(1, largest)) : largest;
  const [plus, minus] = name === "advantage" ? ["up", "down"] : ["likelier", "rarer"];
  return {
    of: (token) => ({ kind: token[key] >= 0 ? plus : minus, strength: Math.min(1, Math.abs(token[key] || 0) / scale) }),
    keys: [h(`i.swatch.${plus}`, {}, name === "ratio" ? `×${number(Math.exp(scale))}` : signed(scale)),
      h(`i.swatch.${minus}`, {}, name === "ratio" ? `×${number(Math.exp(-scale))}` : signed(-scale))],
  };
}

function tokenMark(token, coloring) {
  const { kind, strength } = coloring.of(token);
  const mark = h(`span.t${kind ? `.${kind}` : ""}`, { "data-t": String(token.place) });
  if (strength !== undefined) mark.style.setProperty("--strength", `${(strength * 100).toFixed(1)}%`);
  if (token.text === undefined) {
    mark.classList.add("number");
    mark.textContent = String(token.id);
    return mark;
  }
  // A line's end is seen, and ends the line.
  token.text.split(/(\n)/).forEach((part) => {
    if (part === "\n") mark.append(h("span.eol", {}, "↵"), "\n");
    else mark.append(...shown(part));
  });
  if (token.text === "") mark.append(h("span.eol", {}, "∅"));
  return mark;
}

function described(token) {
  const fields = [
    ["", `#${token.place}`], ["id", String(token.id)],
    ["text", token.text === undefined ? "unknown" : JSON.stringify(token.text)],
    ["", token.origin], ["turn", String(token.turn + 1)],
    token.role ? ["role", token.role] : null,
    token.version === null ? null : ["version", String(token.version)],
    token.logprob === undefined ? null : ["log p", number(token.logprob, 4)],
    token.logprob === undefined ? null : ["p", number(Math.exp(token.logprob), 3)],
    token.gap === undefined ? null : ["ratio", number(Math.exp(token.gap), 4)],
    token.advantage === undefined ? null : ["advantage", signed(token.advantage)],
    token.teacher === undefined ? null : ["teacher − sampler", signed(token.teacher)],
  ];
  return fields.filter(Boolean).map(([name, value]) => h("span", {}, name ? h("small", {}, `${name} `) : null, shown(value)));
}
