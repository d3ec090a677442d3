// How a timeline looks. The colours are those of the style sheet.

const PRODUCTS = ["product", "product-2", "product-3"];
const COLOURS = [
  ...PRODUCTS, "hidden", "exposed", "reduce", "wait", "ink", "muted", "line", "band", "sheet",
  "accent", "fine", "on-fill", "on-hidden",
];
const NARROW = 560; // pixels, below which headings take two lines and labels are short
const MOST_ARROWS = 120; // in a panel; with more, only those of the chosen span are drawn

class Drawing {
  constructor(timeline) {
    this.timeline = timeline;
    this.canvas = timeline.canvas;
    this.context = timeline.canvas.getContext("2d");
    this.family = getComputedStyle(document.body).fontFamily;
    this.products = timeline.kinds.filter(isProduct);
    this.arrows = timeline.box.querySelector(".arrows");
  }

  font(size, weight = 400) { return `${weight} ${size}px ${this.family}`; }

  widthOf(text, size, weight) {
    this.context.font = this.font(size, weight);
    return this.context.measureText(text).width;
  }

  write(text, x, y, { colour = "ink", size = 12, weight = 400, align = "left" } = {}) {
    const width = this.widthOf(text, size, weight);
    this.context.fillStyle = this.colours[colour];
    this.context.textAlign = align;
    this.context.textBaseline = "middle";
    this.context.fillText(text, x, y);
    return width;
  }

  line(colour, width, ...points) {
    this.context.strokeStyle = this.colours[colour];
    this.context.lineWidth = width;
    this.context.beginPath();
    points.forEach(([x, y], i) => (i ? this.context.lineTo(x, y) : this.context.moveTo(x, y)));
    this.context.stroke();
  }

  label(lane) { return `${this.width < NARROW ? "" : "rank "}${lane.rank} ${lane.name}`; }

  resize() {
    const scale = devicePixelRatio || 1;
    ({ width: this.width, height: this.height } = this.canvas.getBoundingClientRect());
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    const labels = this.timeline.lanes.map((lane) => this.widthOf(this.label(lane), 12));
    this.gutter = Math.ceil(Math.max(...labels)) + 12;
    this.timeline.redraw();
  }

  // Read the colours of the theme.
  dress() {
    const probe = element("span");
    this.timeline.box.append(probe);
    this.colours = Object.fromEntries(COLOURS.map((name) => {
      probe.style.color = `var(--${name})`;
      return [name, getComputedStyle(probe).color];
    }));
    probe.remove();
    const tile = this.hatching();
    this.hatch = this.context.createPattern(tile, "repeat");
    this.explain(`url(${tile.toDataURL()})`);
    this.timeline.redraw();
  }

  hatching() {
    const tile = element("canvas"), context = tile.getContext("2d");
    tile.width = tile.height = 8;
    context.fillStyle = this.colours.exposed;
    context.fillRect(0, 0, 8, 8);
    context.strokeStyle = this.colours.sheet;
    context.globalAlpha = 0.55;
    context.lineWidth = 1.6;
    context.beginPath();
    for (const shift of [-8, 0, 8]) {
      context.moveTo(shift, 8);
      context.lineTo(shift + 8, 0);
    }
    context.stroke();
    return tile;
  }

  look(kind) {
    if (kind === "copy") return this.hatch;
    if (!isProduct(kind)) return this.colours[kind];
    return this.colours[PRODUCTS[this.products.indexOf(kind) % PRODUCTS.length]];
  }

  // Fill the legend with the kinds of this timeline.
  explain(hatch) {
    const { colours } = this, stroke = `linear-gradient(${colours.ink} 0 0) center / 2px no-repeat`;
    const all = [
      ...this.products.map((kind) => [kind, kind, this.look(kind), "11px"]),
      ["copy", "copy hidden behind a product", colours.hidden, "11px"],
      ["copy", "copy exposed", hatch, "11px"],
      ["reduce", "reduce", colours.reduce, "11px"],
      ["wait", "wait", colours.wait, "3px"],
      ["notify", "notify", stroke, "13px"],
    ];
    const items = all.filter(([kind]) => this.timeline.kinds.includes(kind));
    const legend = this.timeline.box.querySelector(".legend");
    legend.replaceChildren(...items.map(([, name, background, height]) => {
      const swatch = element("i");
      Object.assign(swatch.style, { background, height });
      return element("li", "", swatch, name);
    }));
  }

  draw() {
    this.context.clearRect(0, 0, this.width, this.height);
    for (const trace of this.timeline.traces) {
      this.drawLabels(trace);
      this.context.save();
      this.context.beginPath();
      this.context.rect(this.gutter, trace.top, this.timeline.wide, trace.bottom - trace.top);
      this.context.clip();
      this.drawGrid(trace);
      for (const lane of trace.lanes) this.drawLane(lane);
      this.drawEnd(trace);
      if (trace === this.timeline.traces.at(-1)) this.drawGain(trace);
      if (this.arrows.checked) this.drawArrows(trace);
      this.drawChosen(trace);
      this.context.restore();
      this.drawHeading(trace);
    }
    this.drawAxis();
  }

  drawLabels(trace) {
    const { laneHeight } = this.timeline, size = laneHeight >= 12 ? 12 : 9;
    let above;
    for (const lane of trace.lanes) {
      if (lane.rank % 2 === 0) {
        this.context.fillStyle = this.colours.band;
        this.context.fillRect(0, lane.top, this.width, laneHeight);
      }
      if (size === 12 || lane.rank !== above) {
        const look = { colour: "muted", align: "right", size };
        this.write(this.label(lane), this.gutter - 8, lane.top + laneHeight / 2, look);
      }
      above = lane.rank;
    }
  }

  drawHeading(trace) {
    const [base] = this.timeline.traces, narrow = this.width < NARROW;
    const y = trace.top + (narrow ? 15 : this.timeline.headHeight - 16);
    const used = this.write(trace.title, 2, y, { size: 15, weight: 650 });
    this.write(rough(trace.ms), used + 12, y, { size: 14 });
    const words = [];
    if (trace !== base) words.push(`${(base.ms / trace.ms).toFixed(2)}x as fast in this run`);
    if (trace.hidden !== null) words.push(`${trace.hidden.toFixed(0)} % of copying hidden`);
    const look = { colour: "muted", size: 13, align: narrow ? "left" : "right" };
    this.write(words.join("  ·  "), narrow ? 2 : this.width, narrow ? y + 19 : y, look);
  }

  drawGrid(trace) {
    const top = trace.top + this.timeline.headHeight;
    this.context.fillStyle = this.colours.line;
    for (const tick of this.ticks().at) {
      this.context.fillRect(Math.round(this.timeline.x(tick)), top, 1, trace.bottom - top);
    }
  }

  // Bars closer than a pixel and ticks closer than four are left out.
  drawLane(lane) {
    const { laneHeight, view } = this.timeline, { spans, top } = lane;
    let bar = -1, tick = -1;
    const from = first(spans, (span) => span.stop >= view[0]);
    for (let i = from; i < spans.length && spans[i].start <= view[1]; i++) {
      const span = spans[i], right = this.timeline.x(span.stop);
      if (span.kind === "notify") {
        if (right < tick + 4) continue;
        tick = right;
        this.context.fillStyle = this.colours.ink;
        this.context.fillRect(Math.round(right) - 0.5, top + 1, 1.5, laneHeight - 2);
      } else if (right >= bar + 0.5) {
        bar = right;
        this.drawBar(span, right);
      }
    }
  }

  drawBar(span, right) {
    const { timeline, context } = this, { laneHeight } = timeline, { top } = span.lane;
    const left = Math.max(timeline.x(span.start), this.gutter - 2);
    const length = Math.max(Math.min(right, this.width + 2) - left, 0.6);
    context.fillStyle = this.look(span.kind);
    if (span.kind === "wait") {
      context.fillRect(left, top + laneHeight / 2 - 1.5, length, 3);
      return;
    }
    const end = left + length - (length > 3 ? 0.7 : 0); // a gap tells neighbours apart
    const tall = Math.round(0.74 * laneHeight), y = top + Math.round((laneHeight - tall) / 2);
    context.fillRect(left, y, end - left, tall);
    context.fillStyle = this.colours.hidden;
    for (const [start, stop] of span.hidden || []) {
      const from = Math.max(timeline.x(start), left), to = Math.min(timeline.x(stop), end);
      if (to > from) context.fillRect(from, y, to - from, tall);
    }
    if (laneHeight >= 16 && length > 24) this.inscribe(span, left + length / 2, length - 10);
  }

  // Write the longest of some texts that fits into a bar.
  inscribe(span, x, most) {
    const copied = span.kind === "copy", rows = `${span.rows} rows`;
    const texts = [...(copied ? [] : [`${span.kind} ${rows}`]), rows, `${span.rows}`];
    const text = texts.find((each) => this.widthOf(each, 11) < most);
    if (!text) return;
    const y = span.lane.top + this.timeline.laneHeight / 2;
    const isHidden = copied && hiddenTime(span) > (span.stop - span.start) / 2;
    if (copied && !isHidden) {
      const wide = this.widthOf(text, 11) + 8;
      this.context.fillStyle = this.colours.exposed;
      this.context.fillRect(x - wide / 2, y - 7, wide, 14);
    }
    const colour = isHidden ? "on-hidden" : "on-fill";
    this.write(text, x, y + 0.5, { colour, size: 11, align: "center" });
  }

  drawEnd(trace) {
    const end = this.timeline.x(1e6 * trace.ms);
    this.context.setLineDash([4, 3]);
    const top = trace.top + this.timeline.headHeight - 4;
    this.line("ink", 1, [end, top], [end, trace.bottom]);
    this.context.setLineDash([]);
  }

  // The time by which a trace ends before the first one.
  drawGain(trace) {
    const [base] = this.timeline.traces, gain = 1e6 * (base.ms - trace.ms);
    if (gain <= 0) return;
    const y = (trace.top + this.timeline.headHeight + trace.bottom) / 2;
    const left = this.timeline.x(1e6 * trace.ms) + 3, right = this.timeline.x(1e6 * base.ms);
    this.line("fine", 1, [left, y], [right, y]);
    this.line("fine", 1, [left + 6, y - 4], [left, y], [left + 6, y + 4]);
    this.line("fine", 1, [right, y - 9], [right, y + 9]);
    const look = { colour: "fine", align: "center" }, middle = (left + right) / 2;
    for (const [text, dy, size, weight] of [
      [`${(base.ms / trace.ms).toFixed(2)}x`, -13, 15, 650],
      [`${rough(gain / 1e6)} less`, 12, 12, 400],
    ]) {
      if (this.widthOf(text, size, weight) + 8 < right - left) {
        this.write(text, middle, y + dy, { ...look, size, weight });
      }
    }
  }

  drawArrows(trace) {
    const { chosen, view } = this.timeline;
    const near = ([notify, wait]) => wait.stop >= view[0] && notify.stop <= view[1];
    const shown = trace.arrows.filter(near);
    for (const [notify, wait] of shown) {
      const isChosen = chosen === notify || chosen === wait;
      if (isChosen || shown.length <= MOST_ARROWS) this.drawArrow(notify, wait, isChosen);
    }
  }

  drawArrow(notify, wait, isChosen) {
    const { context, timeline } = this, half = timeline.laneHeight / 2;
    const [x, y] = [timeline.x(notify.stop), notify.lane.top + half];
    const [toX, toY] = [timeline.x(wait.stop), wait.lane.top + half];
    const bend = Math.max(12, Math.abs(toX - x) / 2);
    context.strokeStyle = context.fillStyle = this.colours[isChosen ? "accent" : "ink"];
    context.globalAlpha = isChosen ? 1 : 0.4;
    context.lineWidth = isChosen ? 2 : 1;
    context.beginPath();
    context.moveTo(x, y);
    context.bezierCurveTo(x + bend, y, toX - bend, toY, toX, toY);
    context.stroke();
    context.beginPath();
    context.moveTo(toX, toY);
    context.lineTo(toX - 6, toY - 3.5);
    context.lineTo(toX - 6, toY + 3.5);
    context.fill();
    context.globalAlpha = 1;
  }

  drawChosen(trace) {
    const { chosen, laneHeight } = this.timeline;
    if (!chosen || chosen.lane.trace !== trace) return;
    const left = this.timeline.x(chosen.start), right = this.timeline.x(chosen.stop);
    this.context.strokeStyle = this.colours.accent;
    this.context.lineWidth = 2;
    const wide = Math.max(right - left, 1) + 2;
    this.context.strokeRect(left - 1, chosen.lane.top + 1, wide, laneHeight - 2);
  }

  // Round times about a finger apart, and the distance between them.
  ticks() {
    const { view, long, wide } = this.timeline;
    const rough = long / Math.max(2, wide / (this.width < NARROW ? 75 : 110));
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const at = [];
    for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1]; tick += step) at.push(tick);
    return { at, step };
  }

  drawAxis() {
    const { at, step } = this.ticks(), digits = Math.max(0, Math.ceil(6 - Math.log10(step) - 1e-9));
    const y = (this.timeline.bottom + this.height) / 2 + 1;
    for (const tick of at) {
      const text = `${(tick / 1e6).toFixed(digits)} ms`, x = this.timeline.x(tick);
      const half = this.widthOf(text, 12) / 2;
      if (x - half < this.gutter - 20 || x + half > this.width) continue;
      this.write(text, x, y, { colour: "muted", align: "center" });
    }
  }
}
