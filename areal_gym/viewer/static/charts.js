// Curves as SVG: one card per question, a common cross-hair, the numbers in the card's own legend.
import { h, s, fill, number } from "./dom.js";

const MARGIN = { left: 46, right: 10, top: 8, bottom: 20 };

/** Charts that share a cross-hair. */
export class ChartBoard {
  #charts = [];
  #smoothing = 0;

  constructor(onStep) { this.onStep = onStep; }

  add(chart) {
    chart.board = this;
    chart.smoothing = this.#smoothing;
    this.#charts.push(chart);
    return chart.element;
  }

  point(step) {
    for (const chart of this.#charts) chart.point(step);
  }

  smooth(amount) {
    this.#smoothing = amount;
    for (const chart of this.#charts) {
      chart.smoothing = amount;
      chart.draw();
    }
  }

  clear() {
    for (const chart of this.#charts) chart.forget();
    this.#charts = [];
  }
}

/** One card.
 *
 * `series`: [{name, steps, values, color: 0..7, low?, high?, isDotted?, areDots?}]
 * `areShares`: parts of a whole; where one is missing it is 0. `isStacked`: drawn as areas.
 * `format`: of a value. `floor`, `ceiling`: of the axis; `least`: how high it is at least, lest noise around zero look like a landscape.
 */
export class Chart {
  board = null;
  smoothing = 0;
  #size = { width: 0, height: 0 };
  #watch;

  constructor({ title, hint, series, isStacked = false, areShares = isStacked, format = number, floor = null, ceiling = null, least = null }) {
    Object.assign(this, { title, series, isStacked, areShares, format, floor, ceiling, least });
    this.legend = h("div.legend");
    this.plot = s("svg.plot", { role: "img", "aria-label": title });
    this.element = h("figure.chart", {}, h("figcaption", { title: hint || "" }, title), this.legend, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.#moved(event));
    this.plot.addEventListener("pointerleave", () => this.board.point(null));
    this.plot.addEventListener("click", (event) => {
      const step = this.#stepAt(event);
      if (step !== null && this.board.onStep) this.board.onStep(step);
    });
    this.#watch = new ResizeObserver(() => this.draw());
    this.#watch.observe(this.plot);
    this.#write(null);
  }

  /** New numbers of the same series. */
  update(series) {
    this.series = series;
    this.draw();
    this.#write(null);
  }

  forget() { this.#watch.disconnect(); }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    if (width < 20) return;
    this.#size = { width, height };
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const layers = this.isStacked ? this.#stacked() : this.series;
    const [x, y] = this.#scales(layers);
    this.x = x;
    const marks = [...this.#grid(x, y)];
    layers.forEach((layer) => marks.push(...(this.isStacked ? this.#area(layer, x, y) : this.#line(layer, x, y))));
    this.hair = s("line.hair", { y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    fill(this.plot, marks, this.hair);
  }

  /** Show the numbers of this step. */
  point(step) {
    this.#write(step);
    if (!this.hair || !this.x) return;
    const isShown = step !== null && step >= this.x.low && step <= this.x.high;
    this.hair.setAttribute("visibility", isShown ? "visible" : "hidden");
    if (isShown) {
      this.hair.setAttribute("x1", this.x(step));
      this.hair.setAttribute("x2", this.x(step));
    }
  }

  #write(step) {
    fill(this.legend, this.series.map((line) => {
      const { value, at } = step === null ? newest(line, this.areShares) : { value: valueAt(line, step, this.areShares), at: null };
      return h(`span.key.c${line.color}`, {}, h("i"), line.name, " ", h("b", {}, value === null ? "–" : this.format(value)),
        at === null ? null : h("small", {}, ` step ${number(at)}`));
    }), step === null ? null : h("span.at", {}, `step ${step}`));
  }

  #moved(event) {
    const step = this.#stepAt(event);
    if (step !== null) this.board.point(step);
  }

  #stepAt(event) {
    if (!this.x) return null;
    const near = this.x.back(event.clientX - this.plot.getBoundingClientRect().left);
    let best = null;
    for (const line of this.series) {
      for (const step of line.steps) {
        if (best === null || Math.abs(step - near) < Math.abs(best - near)) best = step;
      }
    }
    return best;
  }

  #scales(layers) {
    const steps = layers.flatMap((line) => line.steps);
    const values = layers.flatMap((line) => [...line.values, ...(line.low || []), ...(line.high || [])]).filter(isNumber);
    let low = Math.min(...minmax(values)), high = Math.max(...minmax(values));
    if (this.floor !== null) low = Math.min(this.floor, low);
    if (this.ceiling !== null) high = Math.max(this.ceiling, high);
    if (this.least !== null) high = Math.max(this.least, high);
    if (!values.length) [low, high] = [0, 1];
    if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(0, low * 1.2), Math.max(0, high * 1.2)];
    const { width, height } = this.#size;
    const [first, end] = minmax(steps);
    return [
      linear(first, end === first ? first + 1 : end, MARGIN.left, width - MARGIN.right),
      linear(low, high, height - MARGIN.bottom, MARGIN.top),
    ];
  }

  #grid(x, y) {
    const { width, height } = this.#size;
    const marks = [];
    for (const value of ticks(y.low, y.high, 4)) {
      marks.push(s("line.rule", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
      marks.push(s("text.tick.y", { x: MARGIN.left - 6, y: y(value) + 3.5 }, this.format(value)));
    }
    for (const value of ticks(x.low, x.high, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
      marks.push(s("text.tick.x", { x: x(value), y: height - 5 }, number(value)));
    }
    return marks;
  }

  #line(line, x, y) {
    const marks = [];
    const color = `c${line.color}`;
    if (line.low) {
      line.steps.forEach((step, i) => {
        if (isNumber(line.low[i])) marks.push(s(`line.whisker.${color}`, { x1: x(step), x2: x(step), y1: y(line.low[i]), y2: y(line.high[i]) }));
      });
    }
    if (this.smoothing && !line.areDots) {
      marks.push(s(`path.line.faint.${color}`, { d: path(line.steps, line.values, x, y) }));
      marks.push(s(`path.line.${color}`, { d: path(line.steps, smoothed(line.values, this.smoothing), x, y) }));
    } else {
      marks.push(s(`path.line.${color}${line.isDotted || line.areDots ? ".dotted" : ""}`, { d: path(line.steps, line.values, x, y) }));
    }
    if (line.areDots || line.steps.length === 1) {
      line.steps.forEach((step, i) => {
        if (isNumber(line.values[i])) marks.push(s(`circle.dot.${color}`, { cx: x(step), cy: y(line.values[i]), r: 2.6 }));
      });
    }
    return marks;
  }

  #stacked() {
    let below = null;
    return this.series.map((line) => {
      const values = line.values.map((value) => value || 0);
      const tops = values.map((value, i) => value + (below ? below[i] : 0));
      const layer = { ...line, values: tops, low: below || tops.map(() => 0), high: tops };
      below = tops;
      return layer;
    });
  }

  #area(layer, x, y) {
    if (layer.steps.length === 1) {
      return [s(`line.slab.c${layer.color}`, { x1: x(layer.steps[0]) + 4, x2: x(layer.steps[0]) + 4, y1: y(layer.low[0]), y2: y(layer.high[0]) })];
    }
    const up = layer.steps.map((step, i) => `${x(step).toFixed(1)},${y(layer.high[i]).toFixed(1)}`);
    const down = layer.steps.map((step, i) => `${x(step).toFixed(1)},${y(layer.low[i]).toFixed(1)}`).reverse();
    return [s(`path.area.c${layer.color}`, { d: `M${up.join("L")}L${down.join("L")}Z` })];
  }
}

/** A small curve without axes, for a row of a table. */
export function spark(values, width = 96, height = 20) {
  const kept = values.map((value, i) => [i, value]).filter(([, value]) => isNumber(value));
  const plot = s("svg.spark", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  if (kept.length < 2) return plot;
  const [low, high] = minmax(kept.map(([, value]) => value));
  const x = linear(0, values.length - 1, 2, width - 2);
  const y = linear(Math.min(0, low), Math.max(high, Math.min(0, low) + 1e-9), height - 2, 2);
  plot.append(s("path.line.c0", { d: path(kept.map(([i]) => i), kept.map(([, value]) => value), x, y) }));
  return plot;
}

function linear(low, high, from, to) {
  const scale = (value) => from + ((value - low) / (high - low)) * (to - from);
  scale.back = (place) => low + ((place - from) / (to - from)) * (high - low);
  return Object.assign(scale, { low, high });
}

function path(steps, values, x, y) {
  let text = "", isPenUp = true;
  for (let i = 0; i < steps.length; i++) {
    if (!isNumber(values[i])) { isPenUp = true; continue; }
    text += `${isPenUp ? "M" : "L"}${x(steps[i]).toFixed(1)},${y(values[i]).toFixed(1)}`;
    isPenUp = false;
  }
  return text;
}

function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

function ticks(low, high, num) {
  const rough = (high - low) / num;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / size - 1e-9) * size; value <= high + size * 1e-9; value += size) {
    found.push(Math.abs(value) < size * 1e-9 ? 0 : Number(value.toPrecision(12)));
  }
  return found;
}

function minmax(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function isNumber(value) { return typeof value === "number" && Number.isFinite(value); }

/** The newest number of a line; `at` is its step where later ones have none. */
function newest(line, isShare) {
  const end = line.values.length - 1;
  if (isShare) return { value: end < 0 ? null : valueAt(line, line.steps[end], true), at: null };
  for (let i = end; i >= 0; i--) {
    if (isNumber(line.values[i])) return { value: line.values[i], at: i === end ? null : line.steps[i] };
  }
  return { value: null, at: null };
}

/** A share that was not recorded at a step is none of the whole. */
function valueAt(line, step, isShare) {
  const i = line.steps.indexOf(step);
  if (i < 0) return null;
  return isNumber(line.values[i]) ? line.values[i] : isShare ? 0 : null;
}
