// A timeline: the part of the time that is shown, the instruction that is chosen, and its tip.

const SHORTEST = 200; // nanoseconds: the closest zoom

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

class Timeline {
  constructor(box) {
    const packed = JSON.parse(box.querySelector("script").textContent);
    this.box = box;
    this.canvas = box.querySelector("canvas");
    this.tip = box.querySelector(".tip");
    this.traces = unpack(packed);
    this.lanes = this.traces.flatMap((trace) => trace.lanes);
    this.kinds = packed.kinds;
    this.laneHeight = Number(box.dataset.lane);
    this.headHeight = Number(box.dataset.head);
    this.full = [0, 1.02 * Math.max(...this.traces.map((trace) => 1e6 * trace.ms))];
    this.view = [...this.full];
    this.chosen = null;
    this.arrange();
    this.drawing = new Drawing(this);
    redraws.push(() => this.drawing.dress());
    new ResizeObserver(() => this.drawing.resize()).observe(this.canvas.parentElement);
    this.drawing.resize();
    this.drawing.dress();
  }

  // Place the lanes of each trace below its heading.
  arrange() {
    let y = 0;
    for (const trace of this.traces) {
      trace.top = y;
      y += this.headHeight;
      for (const lane of trace.lanes) {
        lane.top = y;
        y += this.laneHeight;
      }
      trace.bottom = y;
    }
    this.bottom = y;
  }

  redraw() {
    [this.box.dataset.from, this.box.dataset.to] = this.view;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.drawing.draw());
  }

  // The time that is shown is `long`, and takes `wide` pixels from `left` on.
  get left() { return this.drawing.gutter; }
  get wide() { return this.drawing.width - this.left; }
  get long() { return this.view[1] - this.view[0]; }

  x(time) { return this.left + (time - this.view[0]) / this.long * this.wide; }

  timeAt(x) { return this.view[0] + (x - this.left) / this.wide * this.long; }

  show(from, to) {
    const long = Math.min(Math.max(to - from, SHORTEST), this.full[1]);
    const start = Math.min(Math.max(from, 0), this.full[1] - long);
    this.view = [start, start + long];
    this.redraw();
  }

  showAll() { this.show(...this.full); }

  zoom(factor, x = this.left + this.wide / 2) {
    const at = this.timeAt(Math.max(x, this.left));
    this.show(at - (at - this.view[0]) / factor, at + (this.view[1] - at) / factor);
  }

  pan(pixels) {
    const time = pixels * this.long / this.wide;
    this.show(this.view[0] + time, this.view[1] + time);
  }

  // The span at a place, or the nearest within a few pixels; notifies are short, so they go first.
  spanAt(x, y) {
    const lane = this.lanes.find(({ top }) => y >= top && y < top + this.laneHeight);
    if (!lane || x < this.left) return null;
    const reach = 4 * this.long / this.wide, time = this.timeAt(x);
    let best = null, least = Infinity;
    const from = first(lane.spans, (span) => span.stop >= time - reach);
    for (let i = from; i < lane.spans.length && lane.spans[i].start <= time + reach; i++) {
      const span = lane.spans[i];
      const away = span.kind === "notify"
        ? Math.abs(span.stop - time) - reach / 2
        : Math.max(span.start - time, time - span.stop, 0);
      if (away < least) [best, least] = [span, away];
    }
    return best;
  }

  // Choose a span, or none, and describe it near `x`, by default near its middle.
  choose(span, x) {
    this.chosen = span;
    this.tip.hidden = !span;
    if (span) {
      this.describe(span);
      const from = Math.max(span.start, this.view[0]), to = Math.min(span.stop, this.view[1]);
      this.placeTip(span.lane, x === undefined ? this.x((from + to) / 2) : x);
    }
    this.redraw();
  }

  describe(span) {
    const { lane, text, rows } = span, length = span.stop - span.start, facts = [];
    const written = text.match(/-> (\S+)@(\d+)\[(\d+):(\d+)\]/);
    if (written) {
      const [, buffer, rank, from, to] = written;
      facts.push(["rows", `${from} to ${to - 1} of ${buffer} on rank ${rank} (${rows})`]);
    } else if (rows) facts.push(["rows", `${rows}`]);
    facts.push(["start", duration(span.start)], ["takes", duration(length)]);
    if (span.kind === "copy") {
      const part = (100 * hiddenTime(span) / (length || 1)).toFixed(0);
      facts.push(["hidden", `${part} % behind products of rank ${lane.rank}`]);
    }
    if (span.endedBy) {
      const { lane: { rank, name }, stop } = span.endedBy;
      facts.push(["ended by", `the notify of rank ${rank}, ${name}, at ${duration(stop)}`]);
    }
    const list = facts.flatMap(([name, fact]) => [element("dt", name), element("dd", fact)]);
    this.tip.replaceChildren(
      element("b", `${lane.trace.title}: rank ${lane.rank}, ${lane.name}`),
      element("code", text),
      element("dl", "", ...list),
    );
  }

  placeTip(lane, x) {
    const { offsetWidth: wide, offsetHeight: high, style } = this.tip;
    const below = lane.top + this.laneHeight + 8, above = lane.top - high - 8;
    const lowest = this.canvas.getBoundingClientRect().top + below + high;
    style.left = `${Math.min(Math.max(x - wide / 2, 0), this.drawing.width - wide)}px`;
    style.top = `${lowest > innerHeight ? above : below}px`;
  }

  // Choose the next or previous span of a lane, or one of another lane at the same time.
  step(along, across) {
    let next;
    if (!this.chosen) [next] = this.lanes[0].spans;
    else if (across) {
      const other = this.lanes[this.lanes.indexOf(this.chosen.lane) + across];
      const since = other && first(other.spans, (span) => span.stop >= this.chosen.start);
      next = other && (other.spans[since] || other.spans.at(-1));
    } else next = this.chosen.lane.spans[this.chosen.index + along];
    if (!next) return;
    const { long } = this;
    if (next.start < this.view[0] || next.stop > this.view[1]) {
      this.show(next.start - 0.1 * long, next.start + 0.9 * long);
    }
    this.choose(next);
  }
}
