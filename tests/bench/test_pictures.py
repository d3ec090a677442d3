"""Nothing is drawn over anything else in pictures of any height."""

from itertools import combinations

import pytest

from weft_tools.bench.pictures import picture


@pytest.mark.parametrize("panels", [1, 2, 5, 9])
def test_the_line_on_the_run_is_between_the_title_and_the_first_panel(panels, tmp_path):
    about = "2030-01-01T00:00:00+00:00; a machine, 2 cores"
    with picture(tmp_path / "p.png", 11, 1.5 * panels + 1, "a title", about=about) as figure:
        for panel in figure.subplots(panels, 1, squeeze=False)[:, 0]:
            panel.set_title("a panel", loc="left")
    figure.draw_without_rendering()
    first = figure.axes[0]
    line = next(text for text in figure.texts if text.get_text() == about)
    # the left one of a panel's three titles
    titles = [
        text for text in first.get_children() if getattr(text, "get_text", str)() == "a panel"
    ]
    boxes = [text.get_window_extent() for text in (*titles, line)]
    assert len(boxes) == 2
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    title = figure._suptitle.get_window_extent()
    assert title.y0 < line.get_window_extent().y1 < title.y1, "in the title's empty second line"
