"""Pages lead somewhere: each link and anchor of README, docs and their fellows, each page in the
site's navigation.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from reference_pages.writing import PAGES
from site_hook import ABOVE, LINK, PICTURE, slug

ROOT = Path(__file__).parents[1]
WRITTEN = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
)
FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)


def all_pages(root):
    return [
        *(root / name for name in WRITTEN if (root / name).exists()),
        *sorted((root / "docs").rglob("*.md")),
    ]


def anchors(page):
    """As GitHub makes them: a heading's second copy gets a number."""
    found = []
    for title in re.findall(r"^#+ (.+?)#*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M):
        plain = slug(LINK.sub(r"\1", title))
        found.append(f"{plain}-{found.count(plain)}" if plain in found else plain)
    return set(found)


def dead_links(root):
    """Relative links whose file is not there, and anchors that no heading has."""
    problems = []
    for page in all_pages(root):
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for _, path, anchor in [
            *LINK.findall(text),
            *((words, path, "") for words, path in PICTURE.findall(text)),
        ]:
            if re.match(r"[a-z]+:", path):
                continue
            target = page.parent / path if path else page
            name = f"{page.relative_to(root)}: {path}{anchor}"
            if path.startswith("/") or not target.exists():
                problems.append(f"{name}: there is no such file")
            elif anchor and anchor[1:] not in anchors(target):
                problems.append(f"{name}: no such heading")
    return problems


def listed(entry):
    """Pages in a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [
        page
        for inner in (entry.values() if isinstance(entry, dict) else entry)
        for page in listed(inner)
    ]


def wrong_nav(root):
    """Pages that no menu shows, entries that no page has, pages shown twice."""
    nav = listed(yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    there = {
        path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")
    } | {*ABOVE.values()}
    return [
        *(f"{page} is not in mkdocs.yml's nav" for page in sorted(there - {*nav})),
        *(f"mkdocs.yml's nav has {page}: there is no such page" for page in sorted({*nav} - there)),
        *(
            f"mkdocs.yml's nav has {page} twice"
            for page in sorted({page for page in nav if nav.count(page) > 1})
        ),
    ]


def test_no_link_is_dead():
    assert dead_links(ROOT) == []
    assert sum(len(LINK.findall(page.read_text())) for page in all_pages(ROOT)) > 100


def test_every_page_is_in_the_navigation():
    assert wrong_nav(ROOT) == []


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_what_the_code_says(name):
    there = ROOT / "docs" / "reference" / name
    assert there.exists() and there.read_text(encoding="utf-8") == PAGES[name](), (
        "`make reference` writes it anew"
    )


PAGE = "# A page\n\n## One more `--thing`\n\n"
PLANTED = [
    ("[x](gone.md)", dead_links, "docs/a.md: gone.md: there is no such file"),
    ("[x](#no-such)", dead_links, "docs/a.md: #no-such: no such heading"),
    ("[x](b.md#a-pages)", dead_links, "docs/a.md: b.md#a-pages: no such heading"),
    ("[x](../README.md#gone)", dead_links, "docs/a.md: ../README.md#gone: no such heading"),
    ("", wrong_nav, "c.md is not in mkdocs.yml's nav"),
]


@pytest.mark.parametrize(("text", "rule", "said"), PLANTED)
def test_a_planted_fault_is_found(tmp_path, text, rule, said):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/a.md", "docs/b.md", "docs/c.md"):
        (tmp_path / name).write_text(PAGE + "[x](b.md#one-more---thing)\n" * name.endswith("a.md"))
    nav = "nav: [{x: a.md}, {y: [b.md, {z: c.md}]}, " + ", ".join(ABOVE.values()) + "]\n"
    (tmp_path / "mkdocs.yml").write_text(nav)
    assert (dead_links(tmp_path), wrong_nav(tmp_path)) == ([], []), (
        "without a fault nothing is found"
    )
    (tmp_path / "docs" / "a.md").write_text(PAGE + text)
    (tmp_path / "mkdocs.yml").write_text(
        nav.replace(", {z: c.md}", "") if rule is wrong_nav else nav
    )
    assert rule(tmp_path) == [said]


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="mkdocs-material: pip install 'forerun[docs]'",
)
def test_the_site_is_built_strictly_and_asks_nobody_else(tmp_path):
    """As `make docs` does; whatever a page would load comes with the site."""
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    built = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert tmp_path / "index.html" in built and tmp_path / "reference" / "cli.html" in built
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"(?:https?:)?//[^>]*stylesheet"
    )
    assert [path.name for path, text in built.items() if loads.search(text)] == []
    assert not any('class="mermaid"' in text for text in built.values()), (
        "its program comes from elsewhere"
    )
    outside = re.compile(r"@import|url\([\"']?(?:https?:)?//")
    assert [path.name for path in tmp_path.rglob("*.css") if outside.search(path.read_text())] == []


def test_the_changelog_is_one_page_until_the_first_release():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings == ["0.1.0 (unreleased)"]
    assert len(text.split()) <= 700
