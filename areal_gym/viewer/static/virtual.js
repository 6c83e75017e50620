// Rows of equal height in a scrolling element; only those in sight are drawn.
import { h } from "./dom.js";

const SPARE = 12;

/** Draws the rows in sight of `scroller`: `draw(i)` makes the element of row i, `rowHeight()` is in pixels. */
export class VirtualRows {
  #drawn = new Map();
  #num = 0;

  constructor(label, rowHeight, draw) {
    Object.assign(this, { rowHeight, draw });
    this.space = h("div.space");
    this.scroller = h("div.scroller", { tabindex: "0", "aria-label": label }, this.space);
    this.scroller.addEventListener("scroll", () => this.#update());
    new ResizeObserver(() => this.redraw()).observe(this.scroller);
  }

  /** Show so many rows, all of them drawn anew. */
  show(num) {
    this.#num = num;
    this.redraw();
  }

  redraw() {
    this.space.style.height = `${this.#num * this.rowHeight()}px`;
    for (const element of this.#drawn.values()) element.remove();
    this.#drawn.clear();
    this.#update();
  }

  /** Scroll as far as needed for row i to be in sight. */
  reveal(i) {
    const row = this.rowHeight(), top = i * row, height = this.scroller.clientHeight;
    if (top < this.scroller.scrollTop + row) this.scroller.scrollTop = top - row;
    else if (top > this.scroller.scrollTop + height - 2 * row) this.scroller.scrollTop = top - height + 2 * row;
  }

  #update() {
    const row = this.rowHeight();
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / row) - SPARE);
    const end = Math.min(this.#num, first + Math.ceil(this.scroller.clientHeight / row) + 2 * SPARE);
    for (const [i, element] of this.#drawn) {
      if (i < first || i >= end) { element.remove(); this.#drawn.delete(i); }
    }
    for (let i = first; i < end; i++) {
      if (this.#drawn.has(i)) continue;
      const element = this.draw(i);
      element.style.transform = `translateY(${i * row}px)`;
      this.#drawn.set(i, element);
      this.space.append(element);
    }
  }
}
