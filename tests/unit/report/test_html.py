"""The report as a page: what it says, that it is whole, and what a browser makes of it."""

from __future__ import annotations

import dataclasses
import html
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from frostline.report.html import page
from frostline.report.sections import sections
from frostline.report.timeline import draw
from frostline.results import Finding, ModuleUse, Profile, Row, Span, Steps, Sync

from .conftest import timeline

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\udc80\x00&amp;'
VOID = {"meta", "br", "input"}


class Outline(HTMLParser):
    """The page's tags, its words, and whether each tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def hostile(make) -> Profile:
    return make(
        command=HOSTILE, boundary=HOSTILE, notes=(HOSTILE,), findings=(Finding(HOSTILE, HOSTILE, HOSTILE),),
        modules=(ModuleUse(HOSTILE, HOSTILE, 1, 5.0, prefix=HOSTILE),),
        syncs=(Sync(HOSTILE, HOSTILE, 1, 1.0),), rows=(Row(HOSTILE, HOSTILE, 60.0, 1.0, HOSTILE),),
        timeline=(Span(HOSTILE, HOSTILE, HOSTILE, 0.0, 5.0),),
        versions={HOSTILE: HOSTILE},
    )  # fmt: skip


def test_the_page_is_whole_and_asks_for_nothing_else(make, empty):
    for profile in (make(), hostile(make), empty):
        text = page(profile)
        found = Outline(text)
        assert found.open == []
        assert not re.search(r"https?://|@import|<link|<script|<iframe", text)
        assert not [a for _, attrs in found.tags for a in attrs if a in ("src", "href", "onerror", "onclick")]
        text.encode()  # can be written to a file


def test_it_says_what_the_terminal_says(make):
    profile = make()
    said = Outline(page(profile)).text
    for section in sections(profile):
        assert section.title in said
        for row in section.rows:
            assert all(" ".join(cell.split()) in said for cell in row)
    for words in (profile.verdict.text, *profile.verdict.evidence, *profile.notes, "525 samples/s", "+0.6 %"):
        assert words in said


def test_names_of_other_people_are_words_and_nothing_else(make):
    text = page(hostile(make))
    found = Outline(text)
    assert "<script>" in found.text
    assert not [tag for tag, _ in found.tags if tag in ("script", "img")]
    assert "\x00" not in text
    assert {
        kind for _, attrs in found.tags for kind in (attrs.get("class") or "").split() if "k-" in kind
    } == {"k-other"}


def test_an_empty_profile_is_a_page_without_pictures(empty):
    found = Outline(page(empty))
    assert "No step was seen" in found.text
    assert "svg" not in [tag for tag, _ in found.tags]


def test_the_bar_has_a_box_for_each_row_and_hatches_the_overlap(make):
    text = page(make())
    bar = text[text.index('<svg class="bar"') : text.index('<table class="legend"')]
    assert len(re.findall(r"<title>[^<]+: [\d.]+ ms, [\d.]+ %", bar)) == 7
    assert bar.count('class="hatched"') == 1
    ends = [float(x) + float(w) for x, w in re.findall(r'x="([\d.]+)%" y="\d+" width="([\d.]+)%"', bar)]
    assert max(ends) == pytest.approx(100, abs=0.1)


def test_rows_that_do_not_reconcile_are_a_warning(make):
    assert "Warning." in Outline(page(make(wall=Steps(80, 79, 81, 50)))).text
    assert "Warning." not in Outline(page(make())).text


def test_a_timeline_of_very_many_spans_stays_small(make):
    drawn = draw(timeline(steps=4, tiny=20_000))
    assert drawn.count("<rect") <= 1500
    assert "short ones" in drawn
    assert Outline(drawn).open == []


def test_spans_at_the_same_time_do_not_hide_each_other():
    both = [Span("device", "copy", "a", 0.0, 10.0), Span("device", "forward", "b", 2.0, 5.0)]
    tops = re.findall(r'<svg x="[^"]+" y="(\d+)"', draw(both))
    assert len(set(tops)) == 2


def test_what_workers_prepare_is_not_taken_for_the_scripts_own_code(make):
    spans = Span("worker 1", "prepare", "Photos", 0.0, 5.0), Span("host", "data", "waiting", 0.0, 5.0)
    text = page(make(timeline=spans))
    assert '<i class="k-prepare"></i>prepare' in text
    assert re.search(r'<svg [^>]*><title>Photos: [^<]*</title><rect class="k-prepare"', text)
    assert '<i class="k-other"></i>other</span></p>' not in text
    assert ".k-prepare { fill: #" in text


def test_odd_timelines_and_times(make):
    odd = (Span("host", "data", "none", 5.0, 0.0), Span("host", "data", "nan", float("nan"), 1.0))
    for spans in ((), odd, odd[:1]):
        assert Outline(page(make(timeline=spans))).open == []
    same = make(wall=Steps(60, 60, 60, 3, (60.0, 60.0, 60.0)))
    assert "How steady" in page(same)
    assert "How steady" not in page(make(wall=Steps(60, 59, 61, 1, (60.0,))))


# --- in a browser -------------------------------------------------------------------------------------


@pytest.fixture
def chromium(tmp_path: Path):
    """chromium(file, *options): what headless Chromium prints for it."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        pytest.skip("needs chromium on PATH")
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]

    def run(path: Path, *options: str) -> str:
        call = [program, *fixed, *options, path.as_uri()]
        return subprocess.run(call, capture_output=True, text=True, timeout=500, check=True).stdout

    return run


MEASURE = """<!doctype html><body style="margin:0">{frames}<script>
addEventListener("load", () => {{
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, box = page.querySelector("svg.timeline rect").getBoundingClientRect();
    frame.outerHTML = `<p>${{frame.id}} ${{page.documentElement.scrollWidth}}
      ${{page.querySelectorAll("svg").length}} ${{box.width > 0}}
      ${{page.querySelectorAll("script, img").length}}</p>`;
  }}
}});
</script>"""


@pytest.mark.parametrize("evil", [False, True])
def test_a_browser_shows_it_without_scrolling_sideways(make, tmp_path, chromium, evil):
    """Inside frames, as a window cannot be made as narrow as a telephone."""
    profile = make()
    if evil:
        long = "x" * 400
        profile = dataclasses.replace(hostile(make), command=long, syncs=(Sync(long, "item", 1, 2.0),))
    held = html.escape(page(profile))
    frames = "".join(
        f'<iframe id="w{wide}" style="border:0;width:{wide}px;height:900px" srcdoc="{held}"></iframe>'
        for wide in (420, 1200)
    )
    (tmp_path / "measure.html").write_text(MEASURE.format(frames=frames), encoding="utf-8")
    dom = chromium(tmp_path / "measure.html", "--dump-dom")
    found = {int(w): rest.split() for w, rest in re.findall(r"<p>w(\d+)([^<]+)</p>", dom)}
    assert set(found) == {420, 1200}
    for wide, (scrolled, pictures, drawn, foreign) in found.items():
        assert int(scrolled) <= wide
        assert int(pictures) >= 3
        assert (drawn, foreign) == ("true", "0")


def test_a_browser_paints_it(make, tmp_path, chromium):
    """A blank page of this size compresses to less than 10 kB."""
    (tmp_path / "report.html").write_text(page(make()), encoding="utf-8")
    picture = tmp_path / "report.png"
    chromium(tmp_path / "report.html", f"--screenshot={picture}", "--window-size=1200,2000")
    assert picture.stat().st_size > 50_000
