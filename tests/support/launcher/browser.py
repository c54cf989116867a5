"""Measurement of an HTML page in headless Chromium, in several frames at once."""

import html
import json
import re
import shutil
import subprocess

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PAPER_PIXELS = (688, 971)
"""Size of an A4 sheet without its margins of 14 and 20 mm, at 96 pixels per inch."""
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
_MEASURE = """
window.wrong = [];
addEventListener("error", e => wrong.push(String(e.message)));
addEventListener("securitypolicyviolation", e => wrong.push("fetched " + e.blockedURI));
addEventListener("load", () => {
  const folded = document.documentElement.scrollWidth;
  for (const e of document.querySelectorAll("details")) e.open = true;
  const all = [...document.querySelectorAll("main *")];
  const channels = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => c.slice(0, 3).map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = channels(getComputedStyle(e).backgroundColor); if (c.length == 3 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const says = e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
  const contrast = {}, letters = [], cut = [];
  for (const e of all.filter(says)) {
    if (e.closest("title")) continue;
    const svg = e.closest("svg"), style = getComputedStyle(e);
    const r = ratio(channels(svg ? style.fill : style.color), behind(svg ? svg.parentElement : e));
    const kind = svg ? "figures" : "text";
    if (!(contrast[kind] <= r)) contrast[kind] = r;
    const size = parseFloat(style.fontSize);
    letters.push(svg ? size * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : size);
    if (svg) {
      const inner = e.getBoundingClientRect(), outer = svg.getBoundingClientRect();
      if (inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1
          || inner.bottom > outer.bottom + 1) cut.push(svg.querySelector("title").textContent + ": " + e.textContent);
    }
  }
  const sideways = all.filter(e => !e.closest(".scroll") && !e.closest("svg")
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName);
  parent.measured(NAME, {
    page: Math.max(folded, document.documentElement.scrollWidth), window: innerWidth, sideways, contrast, cut,
    smallest_letter: Math.min(...letters), background: getComputedStyle(document.body).backgroundColor,
    resources: performance.getEntriesByType("resource").length, wrong,
    figures: [...document.querySelectorAll("figure")].map(e => e.getBoundingClientRect().height),
    cut_tables: [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth + 1)
      .map(e => e.textContent.slice(0, 60)),
    breaks: [...document.querySelectorAll("figure")].map(e => getComputedStyle(e).breakInside),
  });
});
"""  # noqa: E501
"""Script that runs in each frame and reports contrast, letter sizes, overflow, and errors."""


def measure_page(source, folder, frames):
    """Return the measurements of a page by frame, and the lines of Chromium's console.

    Args:
        source: HTML of the page.
        folder: Folder for the files of the browser; created if it does not exist.
        frames: Width in pixels and mode (`light`, `dark`, or `paper`) by the name of the frame.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, (width, mode) in frames.items():
        page = source.replace("@media print", "@media all") if mode == "paper" else source
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        script = f"<script>const NAME = {json.dumps(name)};{_MEASURE}</script>"
        page = page.replace(
            "<head>",
            f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">{script}',
        )
        scheme = "dark" if mode == "dark" else "light"
        # Chromium's window cannot be as narrow as a phone, but a frame can.
        parts.append(
            f'<iframe srcdoc="{html.escape(page)}" style="border:0;width:{width}px;height:900px;'
            f'color-scheme:{scheme}"></iframe>'
        )
    collect = (
        "<script>const results = {}; function measured(name, frame) { results[name] = frame; "
        f"if (Object.keys(results).length == {len(frames)}) "
        f"document.title = JSON.stringify(results); "
        f"}}</script>"
    )
    (folder / "windows.html").write_text(f"<!doctype html><title></title>{collect}{''.join(parts)}")
    process = subprocess.run(
        [
            CHROMIUM,
            *_OPTIONS,
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,900",
            "--dump-dom",
            f"file://{folder / 'windows.html'}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r"<title>(\{.*?\})</title>", process.stdout, flags=re.DOTALL)
    assert match, f"the script in the page did not run: {process.stderr[-500:]}"
    console = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(match[1])), console
