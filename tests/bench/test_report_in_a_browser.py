"""The page of saved results in a browser without a window: Chromium, or the one of playwright."""

from __future__ import annotations

import contextlib
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from weft.plan.trace import Span, Trace
from weft_tools.bench import page
from weft_tools.bench.pictures.page import html
from weft_tools.bench.report import hidden

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is missing")

pytestmark = pytest.mark.slow

DESKTOP, PHONE = (1280, 900), (390, 844)
TIMEOUT = 30  # seconds
MS = 1_000_000


def trace(title, copied, product, lane):
    """Each of two ranks multiplies its own 8 rows and the 8 of its peer, which arrive at `copied`,
    in milliseconds; its product of them begins at `product`.
    """
    spans = []
    for rank in range(2):
        peer = 1 - rank
        own, others = f"a@{rank}[0:8]", f"inbox@{rank}[0:8]"
        for on, text, start, stop, rows in (
            ("compute", f"matmul {own} -> out@{rank}[0:8]", 0, 2, 8),
            (lane, f"copy   {own} -> inbox@{peer}[0:8]", copied - 2, copied, 8),
            (lane, f"notify arrived<{rank} on {peer}", copied, copied + 0.001, 0),
            ("compute", f"wait   arrived<{peer} >= 1", copied - 0.5, product, 0),
            ("compute", f"matmul {others} -> out@{rank}[8:16]", product, product + 2, 8),
        ):
            kind = text.partition(" ")[0]
            spans.append(Span(rank, on, kind, text, rows, int(start * MS), int(stop * MS)))
    return Trace(title, tuple(sorted(spans, key=lambda span: span.start)))


TRACES = [trace("sequential", 4.0, 4.1, "compute"), trace("pipelined", 2.5, 2.6, "comm")]


def result():
    times = {"compute": 4.0, "communicate": 2.0, "sequential": 6.1, "pipelined": 4.6}
    rows = {
        name: dict.fromkeys(("median", "mean", "min", "max", "p99"), time) | {"runs": 20}
        for name, time in times.items()
    }
    return {
        "benchmark": "all-gather-matmul",
        "ranks": 2,
        "hosts": 1,
        "neighbours": None,
        "shape": {"m": 16, "k": 8, "n": 8},
        "dtype": "float32",
        "out_dtype": "float32",
        "algorithm": "push",
        "chunk_rows": 8,
        "reason": "as asked for",
        "notes": [],
        "link": None,
        "times_ms": rows,
        "baselines_ms": {"gloo+torch.mm": rows["sequential"] | {"median": 10.0}},
        "streamed_ms": {},
        "speedup": 6.1 / 4.6,
        "overlap_percent": 70.0,
        "limit_ratio": 1.15,
        "tflops": 0.1,
        "chunking_ms": 0.2,
        "exposed_ms": 0.4,
        "hidden_percent": {trace.title: hidden(trace) for trace in TRACES},
        "wrong": dict.fromkeys(times, 0),
        "verified": True,
        "max_error": 1e-6,
        "error_bound": 1e-4,
        "options": {"ranks": 2, "threads": 1},
        "date": "2026-11-25T12:00:00+00:00",
        "machine": {"cpu": "a processor " * 20, "cores": 2, "threads_per_rank": 1},
        "versions": {"weft": "0"},
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    found = tmp_path_factory.mktemp("page") / "report.html"
    sections = [page.section(result(), "result.json", TRACES)]
    found.write_text(html(sections, "0"))
    return found


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
                args=["--no-sandbox"],
            )
        except playwright.Error as error:
            pytest.skip(f"no browser starts here: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def opened(browser, file):
    """Opens the page in a window of a size; at the end there must be no message on the console, no
    error, and no request but for the file.
    """
    said, contexts = [], []

    def open_page(size=DESKTOP, **options):
        context = browser.new_context(viewport=window(size), **options)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: said.append(request.url))
        shown.goto(file.as_uri())
        return shown

    yield open_page
    assert said == [file.as_uri()] * len(contexts)
    for context in contexts:
        context.close()


def window(size):
    return dict(zip(("width", "height"), size, strict=True))


def view(shown):
    """The part of the timeline that is shown, in milliseconds."""
    box = shown.locator(".timeline")
    return tuple(float(box.get_attribute(f"data-{end}")) / MS for end in ("from", "to"))


def place(shown, number, lane):
    """The middle of a lane of the panel with this number, as (left, width, y) in the window."""
    canvas, box = shown.locator("canvas"), shown.locator(".timeline")
    canvas.scroll_into_view_if_needed()
    found = canvas.bounding_box()
    tall, head = (float(box.get_attribute(f"data-{name}")) for name in ("lane", "head"))
    lanes = sum(len(trace.lanes) for trace in TRACES[:number]) + lane
    return found["x"], found["width"], found["y"] + (number + 1) * head + (lanes + 0.5) * tall


def test_the_answer_comes_first(opened):
    shown = opened()
    assert shown.title().startswith("all-gather-matmul: 2 ranks, 16x8x8, float32, push")
    assert shown.locator(".figures .value").all_inner_texts() == ["1.33x", "1.15", "70 %"]
    assert "Verified on every rank" in shown.locator(".verdict").inner_text()
    headings = shown.locator("h2").all_inner_texts()
    assert headings == ["Timeline", "Distance to the limit", "Tables", "How it was measured"]
    assert "copy hidden behind a product" in shown.locator(".timeline .legend").inner_text()


def test_tables_are_sorted_by_a_click(opened):
    shown = opened()
    table = shown.locator("table").first
    header = table.locator("th", has_text="median ms")

    def medians():
        return table.locator("tbody td:nth-child(2)").all_inner_texts()

    before = medians()
    assert before == ["4.000", "2.000", "6.100", "4.600", "10"]
    header.get_by_role("button").click()
    assert medians() == ["2.000", "4.000", "4.600", "6.100", "10"], "as numbers, not words"
    assert header.get_attribute("aria-sort") == "ascending"
    header.get_by_role("button").press("Enter")
    assert medians() == ["10", "6.100", "4.600", "4.000", "2.000"]
    header.get_by_role("button").click()
    assert medians() == before
    versus = table.locator("th", has_text="vs gloo")
    versus.get_by_role("button").click()
    cells = table.locator("tbody td:last-child").all_inner_texts()
    assert cells == ["1.64x", "2.17x", "", "", ""], "empty ones are last"


def test_the_timeline_is_zoomed_and_moved(opened):
    shown = opened()
    full = view(shown)
    assert full[0] == 0
    assert 6.1 < full[1] < 6.4, "both runs on one axis"
    left, width, y = place(shown, 1, 0)
    shown.wait_for_function("performance.now() - lastScroll > 300")  # a page that scrolls, scrolls
    shown.mouse.move(left + width / 2, y)
    shown.mouse.wheel(0, -300)
    shown.wait_for_function("document.querySelector('.timeline').dataset.from > 0")
    near = view(shown)
    assert near[0] > 0
    assert near[1] - near[0] < 0.6 * (full[1] - full[0])
    shown.mouse.down()
    shown.mouse.move(left + width / 2 - 60, y, steps=3)
    shown.mouse.up()
    dragged = view(shown)
    assert dragged[0] > near[0]
    assert dragged[1] - dragged[0] == pytest.approx(near[1] - near[0])
    shown.locator("canvas").press("0")
    assert view(shown) == full
    shown.locator("canvas").press("+")
    closer = view(shown)
    assert closer[1] - closer[0] == pytest.approx((full[1] - full[0]) / 1.5)
    shown.locator("canvas").press("ArrowLeft")
    assert view(shown)[0] < closer[0]
    shown.locator("canvas").press("-")
    shown.locator("canvas").press("-")
    assert view(shown) == full
    shown.get_by_role("button", name="Zoom in").click()
    assert view(shown) == pytest.approx(closer)
    shown.get_by_role("button", name="all").click()
    assert view(shown) == full


def test_instructions_tell_what_they_are(opened):
    shown = opened()
    tip = shown.locator(".tip")
    left, width, y = place(shown, 1, 1)  # rank 0's comm
    shown.mouse.move(left + width * 0.3, y)
    said = tip.inner_text()
    for words in (
        "pipelined: rank 0, comm",
        "copy a@0[0:8] -> inbox@1[0:8]",
        "0 to 7 of inbox on rank 1 (8)",
        "500.0 µs",
        "2.000 ms",
        "75 % behind products of rank 0",
    ):
        assert words in said
    left, width, y = place(shown, 1, 0)
    shown.mouse.move(left + width * 0.43, y)
    assert "ended by\nthe notify of rank 1, comm, at 2.501 ms" in tip.inner_text()
    shown.mouse.move(5, 5)
    assert tip.is_hidden()
    canvas = shown.locator("canvas")
    canvas.press("n")
    assert "sequential: rank 0, compute\nmatmul a@0[0:8] -> out@0[0:8]" in tip.inner_text()
    canvas.press("n")
    assert "0 % behind products of rank 0" in tip.inner_text()
    canvas.press("ArrowDown")
    assert "sequential: rank 1, compute" in tip.inner_text()
    canvas.press("Escape")
    assert tip.is_hidden()


BROKEN = """names => names.filter(name => {
  const range = document.createRange();
  range.selectNodeContents(name);
  return !name.textContent.trim().includes(" ") && range.getClientRects().length > 1;
}).map(name => name.textContent)"""


def test_a_phone(opened):
    shown = opened(PHONE, has_touch=True, is_mobile=True)
    assert shown.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    scroll = shown.locator(".scroll").first
    assert scroll.evaluate("box => box.scrollWidth > box.clientWidth"), (
        "tables scroll by themselves"
    )
    broken = shown.locator(".bar > :first-child").evaluate_all(BROKEN)
    assert broken == [], "names of one word are on one line"
    left, width, y = place(shown, 1, 0)
    shown.touchscreen.tap(left + width * 0.35, y)
    assert "pipelined: rank 0, compute" in shown.locator(".tip").inner_text()


OUTSIDE = """() => [...document.querySelectorAll("main *")].filter(
  each => each.getBoundingClientRect().right > innerWidth && !each.closest(".scroll, canvas, .tip")
).map(each => each.className)"""


def test_long_times_fit_a_phone(browser, tmp_path):
    slow = result()
    for times in (*slow["times_ms"].values(), *slow["baselines_ms"].values()):
        times |= {key: 391.237 * times[key] for key in ("median", "min", "p99")}
    file = tmp_path / "slow.html"
    file.write_text(html([page.section(slow, "result.json", TRACES)], "0"))
    context = browser.new_context(viewport={"width": PHONE[0], "height": PHONE[1]})
    shown = context.new_page()
    shown.goto(file.as_uri())
    assert "1799.690 ms" in shown.locator(".bar.own").inner_text()
    assert shown.evaluate(OUTSIDE) == []
    context.close()


def test_two_fingers_zoom(opened):
    shown = opened(PHONE, has_touch=True, is_mobile=True)
    left, width, y = place(shown, 1, 0)
    full, middle = view(shown), left + width / 2
    touch = shown.context.new_cdp_session(shown)
    for kind, apart in (("touchStart", 40), *(("touchMove", apart) for apart in (80, 120, 160))):
        points = [
            {"x": middle + side * apart / 2, "y": y, "id": n} for n, side in enumerate((-1, 1))
        ]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    near = view(shown)
    assert near[1] - near[0] < 0.6 * (full[1] - full[0])


TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
PIXELS = """
() => {
  const canvas = document.querySelector("canvas"), {width, height} = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data, found = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) {
      const colour = `rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`;
      found[colour] = (found[colour] || 0) + 1;
    }
  }
  return found;
}
"""


def legend(shown, name):
    """The colour that the legend has for a kind of work."""
    swatch = shown.locator(".timeline .legend li", has_text=name).locator("i")
    return swatch.evaluate("box => getComputedStyle(box).backgroundColor")


def test_light_and_dark(opened):
    papers, products = [], []
    for scheme in ("light", "dark"):
        shown = opened(color_scheme=scheme)
        shown.evaluate(TWO_FRAMES)
        painted = shown.evaluate(PIXELS)
        products.append(legend(shown, "matmul"))
        assert painted[products[-1]] > 5000
        assert painted[legend(shown, "copy hidden")] > 1000
        papers.append(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]
    assert products[0] != products[1]
    shown.locator("#theme").click()
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == papers[0]


def test_the_command_is_copied(opened):
    shown = opened(permissions=["clipboard-read", "clipboard-write"])
    button = shown.locator(".copy")
    button.click()
    playwright.expect(button).to_have_text("copied")
    copied = shown.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(
        "weft bench all-gather-matmul --ranks 2 --threads 1 --json result.json"
    )


def test_the_page_does_not_jump(opened):
    shown = opened()
    shown.evaluate(TWO_FRAMES)
    observer = "new PerformanceObserver(() => {})"
    shifts = f"(o => (o.observe({{type: 'layout-shift', buffered: true}}), o))({observer})"
    assert shown.evaluate(f"{shifts}.takeRecords().length") == 0


def test_nothing_is_painted_before_the_program_ran(browser, file):
    start, program, end = file.read_text().partition('<script id="program">')
    may_go_on = threading.Event()

    class InTwoParts(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(start.encode())
            may_go_on.wait(TIMEOUT)
            self.wfile.write(f"{program}{end}".encode())

        def log_message(self, *_):
            pass

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), InTwoParts))
        stack.callback(server.shutdown)
        threading.Thread(target=server.serve_forever).start()
        shown = stack.enter_context(browser.new_page(viewport=window(PHONE), bypass_csp=True))
        shown.goto(f"http://127.0.0.1:{server.server_port}", wait_until="commit")
        shown.locator(".commands").wait_for(state="attached")
        painted = "performance.getEntriesByType('paint').length > 0"
        with pytest.raises(playwright.TimeoutError):
            shown.wait_for_function(painted, polling=20, timeout=500)
        may_go_on.set()
        shown.wait_for_function(painted, polling=20)
