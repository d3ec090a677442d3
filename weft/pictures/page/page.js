"use strict";

// ---- light and dark

const root = document.documentElement;
const redraws = [];

function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  else delete root.dataset.theme;
  redraws.forEach((redraw) => redraw());
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

document.getElementById("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(root.dataset.theme));
let shownTheme;
addEventListener("beforeprint", () => { shownTheme = root.dataset.theme; setTheme("light"); });
addEventListener("afterprint", () => setTheme(shownTheme));

// ---- tables: a click on a header sorts up, the next one down, the third restores the order

function value(cell) {
  return cell.dataset.number === undefined ? cell.textContent.trim() : Number(cell.dataset.number);
}

function compare(a, b) {
  if (a === "" || b === "") return a === b ? 0 : 2 * (a === "") - 1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b);
}

for (const table of document.querySelectorAll("table:not(.plain)")) {
  const headers = [...table.querySelectorAll("th")];
  const groups = [...table.tBodies].map((body) => [body, [...body.rows]]);
  const rows = groups.flatMap(([, own]) => own);
  headers.forEach((header, column) => header.firstElementChild.addEventListener("click", () => {
    const next = { null: "ascending", ascending: "descending", descending: null }[header.getAttribute("aria-sort")];
    headers.forEach((other) => other.removeAttribute("aria-sort"));
    table.classList.toggle("sorted", next !== null);
    if (next === null) {
      groups.forEach(([body, own]) => body.append(...own));
      return;
    }
    header.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const keyed = rows.map((row) => [value(row.cells[column]), row]);
    keyed.sort(([a], [b]) => (a === "" || b === "" ? compare(a, b) : sign * compare(a, b)));
    groups[0][0].append(...keyed.map(([, row]) => row));
  }));
}

// ---- commands to copy

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}

// ---- timelines

const SHORTEST = 200; // nanoseconds: the closest zoom
const NOT_PRODUCTS = new Set(["copy", "reduce", "wait", "notify"]);
let lastScroll = -Infinity; // a wheel that scrolls the page past a timeline does not zoom
addEventListener("scroll", () => { lastScroll = performance.now(); }, { passive: true });

function duration(nanoseconds) {
  if (nanoseconds >= 1e6) return `${(nanoseconds / 1e6).toFixed(3)} ms`;
  return nanoseconds >= 1e3 ? `${(nanoseconds / 1e3).toFixed(1)} µs` : `${nanoseconds} ns`;
}

// The first index from which `test` holds for a sorted list.
function first(list, test) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (test(list[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The intervals that spans cover together, disjoint and in order.
function union(spans) {
  const united = [];
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    const last = united.at(-1);
    if (last && span.start <= last.stop) last.stop = Math.max(last.stop, span.stop);
    else united.push({ start: span.start, stop: span.stop });
  }
  return united;
}

function overlaps(span, intervals) {
  const found = [];
  for (let i = first(intervals, (each) => each.stop > span.start); i < intervals.length && intervals[i].start < span.stop; i++) {
    found.push([Math.max(span.start, intervals[i].start), Math.min(span.stop, intervals[i].stop)]);
  }
  return found;
}

// The spans of a trace as objects, lane by lane; a copy has the parts hidden behind products of its rank.
function unpack(trace, texts, kinds) {
  for (const [number, lane] of trace.lanes.entries()) {
    lane.spans = lane.spans.map(([text, kind, rows, start, length], index) => (
      { text: texts[text], kind: kinds[kind], rows, start, length, stop: start + length, lane: number, index }
    ));
  }
  for (const rank of new Set(trace.lanes.map((lane) => lane.rank))) {
    const spans = trace.lanes.filter((lane) => lane.rank === rank).flatMap((lane) => lane.spans);
    const products = union(spans.filter((span) => !NOT_PRODUCTS.has(span.kind)));
    for (const span of spans) if (span.kind === "copy") span.hidden = overlaps(span, products);
  }
  trace.arrows = trace.arrows.map(([a, i, b, j]) => [trace.lanes[a].spans[i], trace.lanes[b].spans[j]]);
  return trace;
}

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function timeline(box) {
  const { traces: packed, texts, kinds } = JSON.parse(box.querySelector("script").textContent);
  const traces = packed.map((trace) => unpack(trace, texts, kinds));
  const products = kinds.filter((kind) => !NOT_PRODUCTS.has(kind));
  const LANE = Number(box.dataset.lane), HEAD = Number(box.dataset.head), AXIS = Number(box.dataset.axis);
  const canvas = box.querySelector("canvas"), tip = box.querySelector(".tip"), showArrows = box.querySelector(".arrows");
  const context = canvas.getContext("2d");
  const end = Math.max(...traces.map((trace) => 1e6 * trace.ms));
  const full = [0, end * 1.02];
  let view = [...full], gutter = 0, width = 0, height = 0, colours = {}, hatch, chosen = null, frame = 0;

  let y = 0;
  for (const trace of traces) {
    trace.top = y;
    for (const lane of trace.lanes) {
      lane.top = y + HEAD + LANE * trace.lanes.indexOf(lane);
      lane.trace = trace;
    }
    y += HEAD + LANE * trace.lanes.length;
  }
  const bottom = y;
  const laneAt = (py) => traces.flatMap((trace) => trace.lanes).find((lane) => py >= lane.top && py < lane.top + LANE);

  const x = (time) => gutter + (time - view[0]) / (view[1] - view[0]) * (width - gutter);
  const timeAt = (px) => view[0] + (px - gutter) / (width - gutter) * (view[1] - view[0]);

  // -- looks

  function readColours() {
    const probe = element("span");
    box.append(probe);
    for (const name of ["sheet", "band", "ink", "muted", "line", "accent", "fine", "product", "product-2", "product-3", "hidden", "exposed", "reduce", "wait", "on-fill", "on-hidden"]) {
      probe.style.color = `var(--${name})`;
      colours[name] = getComputedStyle(probe).color;
    }
    probe.remove();
    const tile = element("canvas");
    tile.width = tile.height = 8;
    const drawing = tile.getContext("2d");
    drawing.fillStyle = colours.exposed;
    drawing.fillRect(0, 0, 8, 8);
    drawing.strokeStyle = colours.sheet;
    drawing.globalAlpha = 0.55;
    drawing.lineWidth = 1.6;
    for (const shift of [-8, 0, 8]) {
      drawing.beginPath();
      drawing.moveTo(shift, 8);
      drawing.lineTo(shift + 8, 0);
      drawing.stroke();
    }
    hatch = context.createPattern(tile, "repeat");
    legend(tile);
  }

  function colourOf(kind) {
    if (kind === "copy") return hatch;
    if (NOT_PRODUCTS.has(kind)) return colours[kind];
    return colours[["product", "product-2", "product-3"][products.indexOf(kind) % 3]];
  }

  function legend(tile) {
    const keys = products.map((kind) => [kind, colourOf(kind)]);
    if (kinds.includes("copy")) keys.push(["copy hidden behind a product", colours.hidden], ["copy exposed", `url(${tile.toDataURL()})`]);
    if (kinds.includes("reduce")) keys.push(["reduce", colours.reduce]);
    if (kinds.includes("wait")) keys.push(["wait", colours.wait]);
    if (kinds.includes("notify")) keys.push(["notify", colours.ink]);
    box.querySelector(".legend").replaceChildren(...keys.map(([name, look]) => {
      const swatch = element("i");
      swatch.style.background = look;
      if (name === "wait") swatch.style.height = "4px";
      if (name === "notify") swatch.style.width = "2px";
      return element("li", "", swatch, name);
    }));
  }

  // -- drawing

  function resize() {
    const scale = devicePixelRatio || 1;
    ({ width, height } = canvas.parentElement.getBoundingClientRect());
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = font(12);
    const labels = traces.flatMap((trace) => trace.lanes.map(label));
    gutter = Math.ceil(Math.max(...labels.map((text) => context.measureText(text).width))) + 12;
    redraw();
  }

  const family = getComputedStyle(document.body).fontFamily;
  const font = (size, weight = 400) => `${weight} ${size}px ${family}`;
  const label = (lane) => `${width < 560 ? "" : "rank "}${lane.rank} ${lane.name}`;

  function redraw() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(draw);
    box.dataset.from = view[0];
    box.dataset.to = view[1];
  }

  function write(text, px, py, { colour = "ink", size = 12, weight = 400, align = "left" } = {}) {
    context.font = font(size, weight);
    context.fillStyle = colours[colour];
    context.textAlign = align;
    context.textBaseline = "middle";
    context.fillText(text, px, py);
    return context.measureText(text).width;
  }

  function draw() {
    context.clearRect(0, 0, width, height);
    for (const trace of traces) drawPanel(trace);
    drawAxis();
  }

  function drawPanel(trace) {
    const top = trace.top + HEAD;
    for (const lane of trace.lanes) {
      if (lane.rank % 2 === 0) {
        context.fillStyle = colours.band;
        context.fillRect(0, lane.top, width, LANE);
      }
      if (LANE >= 12 || lane.trace.lanes.find((other) => other.rank === lane.rank) === lane) {
        write(label(lane), gutter - 8, lane.top + LANE / 2, { colour: "muted", align: "right", size: LANE >= 12 ? 12 : 9 });
      }
    }
    context.save();
    context.beginPath();
    context.rect(gutter, trace.top, width - gutter, HEAD + LANE * trace.lanes.length);
    context.clip();
    context.fillStyle = colours.line;
    for (const tick of ticks()) context.fillRect(Math.round(x(tick)), top, 1, LANE * trace.lanes.length);
    for (const lane of trace.lanes) drawLane(lane);
    drawEnd(trace, top);
    if (showArrows.checked) drawArrows(trace);
    drawChosen(trace);
    context.restore();
    drawHeading(trace);
  }

  function drawHeading(trace) {
    const compact = width < 560;
    const middle = trace.top + (compact ? 15 : HEAD - 16);
    const used = write(trace.title, 2, middle, { size: 15, weight: 650 });
    write(`${trace.ms.toFixed(3)} ms`, used + 12, middle, { size: 14 });
    const right = [];
    const speedup = traces[0].ms / trace.ms;
    if (trace !== traces[0]) right.push(`${speedup.toFixed(2)}x as fast in this run`);
    if (trace.hidden !== null) right.push(`${trace.hidden.toFixed(0)} % of copying hidden`);
    write(right.join("  ·  "), compact ? 2 : width, compact ? trace.top + 34 : middle, { colour: "muted", size: 13, align: compact ? "left" : "right" });
  }

  function drawLane(lane) {
    const spans = lane.spans, tall = Math.round(LANE * 0.74), dy = lane.top + Math.round((LANE - tall) / 2);
    let drawn = -1, ticked = -1; // right edges of the last bar and tick: bars closer than a pixel and ticks closer than four are left out
    for (let i = first(spans, (span) => span.stop >= view[0]); i < spans.length && spans[i].start <= view[1]; i++) {
      const span = spans[i], from = x(span.start), to = x(span.stop);
      if (span.kind === "notify") {
        if (to < ticked + 4) continue;
        ticked = to;
        context.fillStyle = colours.ink;
        context.fillRect(Math.round(to) - 0.5, lane.top + 1, 1.5, LANE - 2);
        continue;
      }
      if (to < drawn + 0.5) continue;
      drawn = to;
      const left = Math.max(from, gutter - 2), long = Math.max(Math.min(to, width + 2) - left, 0.6);
      if (span.kind === "wait") {
        context.fillStyle = colours.wait;
        context.fillRect(left, lane.top + LANE / 2 - 1.5, long, 3);
        continue;
      }
      const gap = long > 3 ? 0.7 : 0;
      context.fillStyle = colourOf(span.kind);
      context.fillRect(left, dy, long - gap, tall);
      for (const [start, stop] of span.hidden || []) {
        context.fillStyle = colours.hidden;
        const begin = Math.max(x(start), left);
        context.fillRect(begin, dy, Math.max(Math.min(x(stop), to - gap) - begin, 0), tall);
      }
      inscribe(span, left, long, lane);
    }
  }

  function inscribe(span, left, long, lane) {
    if (LANE < 16 || long < 24) return;
    const copied = span.kind === "copy";
    const texts = copied ? [`${span.rows} rows`, `${span.rows}`] : [`${span.kind} ${span.rows} rows`, `${span.rows} rows`, `${span.rows}`];
    context.font = font(11);
    const text = texts.find((each) => context.measureText(each).width < long - 10);
    if (!text) return;
    if (copied && !span.hidden.length) {
      context.fillStyle = colours.exposed;
      const wide = context.measureText(text).width + 8;
      context.fillRect(left + long / 2 - wide / 2, lane.top + LANE / 2 - 7, wide, 14);
    }
    const mostlyHidden = copied && span.hidden.reduce((sum, [a, b]) => sum + b - a, 0) > span.length / 2;
    write(text, left + long / 2, lane.top + LANE / 2 + 0.5, { colour: mostlyHidden ? "on-hidden" : "on-fill", size: 11, align: "center" });
  }

  function drawEnd(trace, top) {
    const stop = 1e6 * trace.ms, down = top + LANE * trace.lanes.length;
    context.strokeStyle = colours.ink;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x(stop), top - 4);
    context.lineTo(x(stop), down);
    context.stroke();
    context.setLineDash([]);
    const saved = 1e6 * traces[0].ms - stop;
    if (trace !== traces.at(-1) || saved <= 0) return;
    const [from, to, middle] = [x(stop) + 3, x(stop + saved), (top + down) / 2];
    context.strokeStyle = context.fillStyle = colours.fine;
    context.beginPath();
    context.moveTo(from, middle);
    context.lineTo(to, middle);
    context.moveTo(from + 6, middle - 4);
    context.lineTo(from, middle);
    context.lineTo(from + 6, middle + 4);
    context.moveTo(to, middle - 9);
    context.lineTo(to, middle + 9);
    context.stroke();
    const text = `${(traces[0].ms / trace.ms).toFixed(2)}x`;
    context.font = font(15, 650);
    if (context.measureText(text).width + 12 < to - from) {
      write(text, (from + to) / 2, middle - 13, { colour: "fine", size: 15, weight: 650, align: "center" });
      const less = `${duration(Math.round(saved))} less`;
      context.font = font(12);
      if (context.measureText(less).width + 8 < to - from) write(less, (from + to) / 2, middle + 12, { colour: "fine", align: "center" });
    }
  }

  function drawArrows(trace) {
    const shown = trace.arrows.filter(([notify, wait]) => wait.stop >= view[0] && notify.stop <= view[1]);
    for (const [notify, wait] of shown) {
      const mine = chosen && (chosen === notify || chosen === wait);
      if (!mine && shown.length > 120) continue;
      const [from, to] = [notify, wait].map((span) => trace.lanes[span.lane].top + LANE / 2);
      const [a, b] = [x(notify.stop), x(wait.stop)];
      context.strokeStyle = context.fillStyle = mine ? colours.accent : colours.ink;
      context.globalAlpha = mine ? 1 : 0.55;
      context.lineWidth = mine ? 2 : 1;
      context.beginPath();
      context.moveTo(a, from);
      const bend = Math.max(12, Math.abs(b - a) / 2);
      context.bezierCurveTo(a + bend, from, b - bend, to, b, to);
      context.stroke();
      context.beginPath();
      context.moveTo(b, to);
      context.lineTo(b - 6, to - 3.5);
      context.lineTo(b - 6, to + 3.5);
      context.fill();
      context.globalAlpha = context.lineWidth = 1;
    }
  }

  function drawChosen(trace) {
    if (!chosen || trace !== chosen.of) return;
    const top = trace.lanes[chosen.lane].top;
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.strokeRect(x(chosen.start) - 1, top + 1, Math.max(x(chosen.stop) - x(chosen.start), 1) + 2, LANE - 2);
    context.lineWidth = 1;
  }

  function ticks() {
    const rough = (view[1] - view[0]) / Math.max(2, (width - gutter) / (width < 560 ? 75 : 110)), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    const found = [];
    for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1]; tick += step) found.push(tick);
    found.step = step;
    return found;
  }

  function drawAxis() {
    const marks = ticks(), digits = Math.max(0, Math.ceil(6 - Math.log10(marks.step) - 1e-9));
    for (const tick of marks) {
      const at = x(tick), text = `${(tick / 1e6).toFixed(digits)} ms`;
      const half = context.measureText(text).width / 2;
      if (at - half >= gutter - 20 && at + half <= width) write(text, at, bottom + AXIS / 2 + 1, { colour: "muted", align: "center" });
    }
  }

  // -- moving

  function show(from, to) {
    const long = Math.min(Math.max(to - from, SHORTEST), full[1]);
    const start = Math.min(Math.max(from, 0), full[1] - long);
    view = [start, start + long];
    redraw();
  }

  function zoom(factor, px = gutter + (width - gutter) / 2) {
    const at = timeAt(Math.max(px, gutter));
    show(at - (at - view[0]) / factor, at + (view[1] - at) / factor);
  }

  const pan = (pixels) => {
    const time = pixels * (view[1] - view[0]) / (width - gutter);
    show(view[0] + time, view[1] + time);
  };

  // -- what an instruction is

  function choose(span, px) {
    chosen = span;
    tip.hidden = !span;
    if (span) describe(span, px);
    redraw();
  }

  function describe(span, px) {
    const lane = span.of.lanes[span.lane], facts = [];
    const written = span.text.match(/-> (\S+)@(\d+)\[(\d+):(\d+)\]/);
    if (written) facts.push(["rows", `${written[3]} to ${written[4] - 1} of ${written[1]} on rank ${written[2]} (${span.rows})`]);
    else if (span.rows) facts.push(["rows", `${span.rows}`]);
    facts.push(["start", duration(span.start)], ["takes", duration(span.length)]);
    if (span.kind === "copy") {
      const hidden = span.hidden.reduce((sum, [a, b]) => sum + b - a, 0);
      facts.push(["hidden", `${(100 * hidden / (span.length || 1)).toFixed(0)} % behind products of rank ${lane.rank}`]);
    }
    const list = element("dl", "", ...facts.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
    tip.replaceChildren(element("b", `${span.of.title}: rank ${lane.rank}, ${lane.name}`), element("code", span.text), list);
    const from = px === undefined ? (Math.max(x(span.start), gutter) + Math.min(x(span.stop), width)) / 2 : px;
    const left = Math.min(Math.max(from - tip.offsetWidth / 2, 0), width - tip.offsetWidth);
    const below = lane.top + LANE + 8, above = lane.top - tip.offsetHeight - 8;
    const lowest = canvas.getBoundingClientRect().top + below + tip.offsetHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${lowest > innerHeight ? above : below}px`;
  }

  function spanAt(px, py) {
    const lane = laneAt(py);
    if (!lane || px < gutter) return null;
    const reach = 4 * (view[1] - view[0]) / (width - gutter), time = timeAt(px);
    let best = null, least = Infinity;
    for (let i = first(lane.spans, (span) => span.stop >= time - reach); i < lane.spans.length; i++) {
      const span = lane.spans[i];
      if (span.start > time + reach) break;
      const tick = span.kind === "notify" ? Math.abs(span.stop - time) - reach / 2 : 0;
      const away = Math.max(span.start - time, time - span.stop, 0) + tick;
      if (away < least) [best, least] = [span, away];
    }
    return best;
  }

  // -- input

  const pointers = new Map();
  let moved = 0;

  const place = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };

  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, place(event));
    canvas.setPointerCapture(event.pointerId);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = place(event), before = pointers.get(event.pointerId);
    if (!before) {
      choose(spanAt(px, py), px);
      return;
    }
    moved += Math.abs(px - before[0]);
    if (pointers.size === 1 && moved > 3) {
      choose(null);
      pan(before[0] - px);
    } else if (pointers.size === 2) {
      const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
      const apart = Math.abs(before[0] - other[0]), now = Math.abs(px - other[0]);
      if (apart > 8 && now > 8) zoom(now / apart, (px + other[0]) / 2);
      pan((before[0] - px) / 2);
    }
    pointers.set(event.pointerId, [px, py]);
  });
  const lift = (event) => {
    const [px, py] = place(event);
    if (event.type === "pointerup" && pointers.size === 1 && moved <= 3) choose(spanAt(px, py), px);
    pointers.delete(event.pointerId);
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") choose(null); });

  canvas.addEventListener("wheel", (event) => {
    const out = event.deltaY > 0, whole = view[1] - view[0] >= full[1];
    if (performance.now() - lastScroll < 250 || (out && whole && !event.ctrlKey)) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX);
    else if (event.shiftKey) pan(event.deltaY);
    else zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0025)), place(event)[0]);
  }, { passive: false });

  // Choose the next span of a lane, or the one of another lane at the same time; move the view there.
  function step(along, across) {
    const lanes = traces.flatMap((trace) => trace.lanes);
    const lane = chosen ? chosen.of.lanes[chosen.lane] : lanes[0];
    let next = chosen ? lane.spans[chosen.index + along] : lane.spans[0];
    if (chosen && across) {
      const other = lanes[lanes.indexOf(lane) + across];
      next = other && other.spans[Math.min(first(other.spans, (span) => span.stop >= chosen.start), other.spans.length - 1)];
    }
    if (!next) return;
    const long = view[1] - view[0];
    if (next.start < view[0] || next.stop > view[1]) show(next.start - long * 0.1, next.start + long * 0.9);
    choose(next);
  }

  const keys = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), "0": () => show(...full),
    ArrowLeft: () => pan(-60), ArrowRight: () => pan(60),
    ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1), n: () => step(1, 0), p: () => step(-1, 0),
    Escape: () => choose(null),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (!["ArrowUp", "ArrowDown", "n", "p"].includes(event.key)) choose(null);
    act();
  });
  const acts = { in: () => zoom(1.5), out: () => zoom(1 / 1.5), all: () => show(...full) };
  for (const button of box.querySelectorAll("[data-act]")) button.addEventListener("click", acts[button.dataset.act]);
  showArrows.addEventListener("change", redraw);

  for (const trace of traces) for (const lane of trace.lanes) for (const span of lane.spans) span.of = trace;
  redraws.push(() => { readColours(); redraw(); });
  readColours();
  new ResizeObserver(resize).observe(canvas.parentElement);
  resize();
}

document.querySelectorAll(".timeline").forEach(timeline);
