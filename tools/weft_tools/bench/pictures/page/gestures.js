// How a timeline is moved: by mouse, wheel, fingers, keys and buttons.

const QUIET = 250; // milliseconds: a wheel that has just scrolled the page does not zoom
let lastScroll = -Infinity;
addEventListener("scroll", () => { lastScroll = performance.now(); }, { passive: true });

function listen(timeline) {
  const { canvas } = timeline, pointers = new Map();
  let moved = 0;

  function place(event) {
    const { left, top } = canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  // Two fingers: zoom by their distance, and follow their middle.
  function pinch(event, before, now) {
    const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const apart = Math.abs(before - other[0]), wider = Math.abs(now - other[0]);
    if (apart > 8 && wider > 8) timeline.zoom(wider / apart, (now + other[0]) / 2);
    timeline.pan((before - now) / 2);
  }

  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, place(event));
    canvas.setPointerCapture(event.pointerId);
    moved = 0;
  });

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event), before = pointers.get(event.pointerId);
    if (!before) {
      timeline.choose(timeline.spanAt(x, y), x);
      return;
    }
    moved += Math.abs(x - before[0]);
    if (pointers.size === 2) pinch(event, before[0], x);
    else if (moved > 3) {
      timeline.choose(null);
      timeline.pan(before[0] - x);
    }
    pointers.set(event.pointerId, [x, y]);
  });

  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = place(event);
    if (pointers.size === 1 && moved <= 3) timeline.choose(timeline.spanAt(x, y), x);
    pointers.delete(event.pointerId);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") timeline.choose(null);
  });

  canvas.addEventListener("wheel", (event) => {
    const past = event.deltaY > 0 && timeline.long >= timeline.full[1] && !event.ctrlKey;
    if (past || performance.now() - lastScroll < QUIET) return; // the page scrolls
    event.preventDefault();
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const pixels = event.deltaMode ? 20 : 1; // of a line
    if (sideways) timeline.pan(pixels * (event.deltaX || event.deltaY));
    else timeline.zoom(Math.exp(-0.0025 * pixels * event.deltaY), place(event)[0]);
  }, { passive: false });

  const moves = {
    "+": () => timeline.zoom(1.5),
    "=": () => timeline.zoom(1.5),
    "-": () => timeline.zoom(1 / 1.5),
    "0": () => timeline.showAll(),
    ArrowLeft: () => timeline.pan(-60),
    ArrowRight: () => timeline.pan(60),
    Escape: () => {},
  };
  const steps = { n: [1, 0], p: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.addEventListener("keydown", (event) => {
    const { key } = event;
    if (!(key in moves || key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (key in steps) timeline.step(...steps[key]);
    else {
      timeline.choose(null);
      moves[key]();
    }
  });

  for (const button of timeline.box.querySelectorAll("[data-key]")) {
    button.addEventListener("click", () => moves[button.dataset.key]());
  }
  timeline.drawing.arrows.addEventListener("change", () => timeline.redraw());
}

document.querySelectorAll(".timeline").forEach((box) => listen(new Timeline(box)));
