"""What a browser makes of a page: several windows of it at once in headless Chromium, measured by a
script of ours.
"""

import html
import json
import re
import shutil
import subprocess

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PAPER_PIXELS = (688, 971)
"""The inner size of an A4 sheet with margins of 14 and 20 mm, at 96 to the inch."""
_QUIET = (
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


def windows(source, folder, frames):
    """What is measured in each frame of a page, and the lines that Chromium's console had.

    Args:
        source: the page.
        folder: for the files of this; made if need be.
        frames: by name, (width in pixels, `light`, `dark` or `paper`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, (width, mode) in frames.items():
        held = source.replace("@media print", "@media all") if mode == "paper" else source
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        script = f"<script>const NAME = {json.dumps(name)};{_MEASURE}</script>"
        held = held.replace(
            "<head>",
            f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">{script}',
        )
        scheme = "dark" if mode == "dark" else "light"
        # A window of Chromium's is never as narrow as a phone; a frame in it may be.
        parts.append(
            f'<iframe srcdoc="{html.escape(held)}" style="border:0;width:{width}px;height:900px;'
            f'color-scheme:{scheme}"></iframe>'
        )
    collect = (
        "<script>const found = {}; function measured(name, of) { found[name] = of; "
        f"if (Object.keys(found).length == {len(frames)}) document.title = JSON.stringify(found); "
        f"}}</script>"
    )
    (folder / "windows.html").write_text(f"<!doctype html><title></title>{collect}{''.join(parts)}")
    done = subprocess.run(
        [
            CHROMIUM,
            *_QUIET,
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
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout, flags=re.DOTALL)
    assert found, f"the page's own script did not run: {done.stderr[-500:]}"
    return json.loads(html.unescape(found[1])), [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]
