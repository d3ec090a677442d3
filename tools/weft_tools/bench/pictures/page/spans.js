// The spans of traces, as weft_tools.bench.pictures.page.lanes packs them. Times are in nanoseconds.

const NOT_PRODUCTS = new Set(["copy", "reduce", "wait", "notify"]);

const isProduct = (kind) => !NOT_PRODUCTS.has(kind);

function duration(nanoseconds) {
  if (nanoseconds >= 1e6) return `${(nanoseconds / 1e6).toFixed(3)} ms`;
  return nanoseconds >= 1e3 ? `${(nanoseconds / 1e3).toFixed(1)} µs` : `${nanoseconds} ns`;
}

// A time of one run, without digits that the next run would not have.
const rough = (milliseconds) => `${Number(milliseconds.toPrecision(3))} ms`;

// The first index of a sorted list from which on `test` holds.
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
  for (const { start, stop } of [...spans].sort((a, b) => a.start - b.start)) {
    const last = united.at(-1);
    if (last && start <= last.stop) last.stop = Math.max(last.stop, stop);
    else united.push({ start, stop });
  }
  return united;
}

// The parts of a span that lie in disjoint intervals.
function overlaps(span, intervals) {
  const found = [];
  const from = first(intervals, (each) => each.stop > span.start);
  for (let i = from; i < intervals.length && intervals[i].start < span.stop; i++) {
    const { start, stop } = intervals[i];
    found.push([Math.max(span.start, start), Math.min(span.stop, stop)]);
  }
  return found;
}

const hiddenTime = (copy) => copy.hidden.reduce((sum, [start, stop]) => sum + stop - start, 0);

// Traces with lanes of spans as objects; a copy has the parts hidden behind products of its rank.
function unpack({ traces, texts, kinds }) {
  for (const trace of traces) {
    for (const lane of trace.lanes) {
      lane.trace = trace;
      lane.spans = lane.spans.map(([text, kind, rows, start, length], index) => (
        { text: texts[text], kind: kinds[kind], rows, start, stop: start + length, lane, index }
      ));
    }
    for (const rank of new Set(trace.lanes.map((lane) => lane.rank))) {
      const lanes = trace.lanes.filter((lane) => lane.rank === rank);
      const spans = lanes.flatMap((lane) => lane.spans);
      const products = union(spans.filter((span) => isProduct(span.kind)));
      for (const span of spans) if (span.kind === "copy") span.hidden = overlaps(span, products);
    }
    const { lanes } = trace;
    trace.arrows = trace.arrows.map(([a, i, b, j]) => [lanes[a].spans[i], lanes[b].spans[j]]);
    for (const [notify, wait] of trace.arrows) wait.endedBy = notify;
  }
  return traces;
}
