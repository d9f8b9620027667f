"""Combines a folder with the book, rustdoc and the web page into one site.

usage: python3 scripts/site.py FOLDER     (scripts/build_site.sh calls it)
       python3 scripts/site.py --book FOLDER    adds the engine's address to the book's pages with live figures

Adds a front page, the files that the book links to, and links back to the front page. Fails if a link leads
nowhere.
"""

import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"""(?:href|src)="([^"]*)\"""")
PLAIN = 'style="color: inherit; text-decoration: none"'
FRONT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GPT-2 in Rust</title>
<style>
  body {{ max-width: 44rem; margin: 0 auto; padding: 1.5rem; font: 1rem/1.5 system-ui, sans-serif; color: #1a1d23; background: #fff; }}
  a {{ color: #0c306e; }}
  dt {{ margin-top: 1rem; font-weight: 600; }}
  dd {{ margin: 0; }}
  @media (prefers-color-scheme: dark) {{ body {{ color: #e6e8eb; background: #16181d; }} a {{ color: #8ab8f0; }} }}
</style>
<h1>GPT-2 in Rust</h1>
<p>Everything in this folder works without a network.</p>
<dl>
  <dt><a href="docs/book/index.html">The book</a></dt>
  <dd>How GPT-2 works, guides and reference. Press <kbd>s</kbd> to search.</dd>
  <dt><a href="page/gpt2.html">The model in the browser</a></dt>
  <dd>Write with it and look inside; nothing to install.</dd>
  <dt>Notebooks</dt>
  {notebooks}
  <dt>The Rust crates</dt>
  {crates}
</dl>
</html>
"""


def crates(site: Path) -> list[str]:
    """Returns a line for each crate with documentation on the site."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--locked"]
    packages = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)["packages"]
    found = []
    for package in sorted(packages, key=lambda package: package["name"]):
        name = package["name"].replace("-", "_")
        if package["publish"] != [] and (site / "rust" / name / "index.html").is_file():
            about = html.escape(package["description"] or "")
            found.append(f'<dd><a href="rust/{name}/index.html">{package["name"]}</a>: {about}</dd>')
    return found


def notebooks(site: Path) -> list[str]:
    """Returns a line for each notebook's page, with the file to run."""
    found = []
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        title = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"][0].removeprefix("# ").strip()
        page = f"docs/book/notebooks/{path.stem}.html"
        found.append(f'<dd><a href="{page}">{html.escape(title)}</a> (<a href="examples/notebooks/{path.name}">to run</a>)</dd>')
    return found


def targets(page: Path) -> list[Path]:
    """Returns the files and folders that a page's links lead to."""
    links = [urlsplit(html.unescape(link)) for link in LINK.findall(page.read_text(encoding="utf-8"))]
    return [(page.parent / unquote(link.path)).resolve() for link in links if link.path and not (link.scheme or link.netloc)]


def copy(site: Path, target: Path) -> None:
    """Copies a file or folder of the repository into the site, except files that git ignores."""
    name = target.relative_to(site)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", name], cwd=ROOT, check=True, capture_output=True, text=True)
    for file in listed.stdout.splitlines():
        if (ROOT / file).is_file():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, site / file)


def connect(book: Path) -> None:
    """Adds the engine's address to each page with a live figure; the hash makes browsers fetch a new engine."""
    version = hashlib.sha256((book / "engine.js").read_bytes()).hexdigest()[:16]
    for page in book.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if 'class="live"' in text:
            up = "../" * len(page.relative_to(book).parent.parts)
            meta = f'<meta name="gpt2-engine" content="{up}engine.js?{version}">'
            page.write_text(text.replace("<head>", f"<head>\n        {meta}", 1), encoding="utf-8")


def main() -> None:
    if sys.argv[1] == "--book":
        connect(Path(sys.argv[2]).resolve())
        return
    site = Path(sys.argv[1]).resolve()
    lists = {"notebooks": "\n  ".join(notebooks(site)), "crates": "\n  ".join(crates(site))}
    (site / "index.html").write_text(FRONT.format(**lists), encoding="utf-8")
    book = sorted((site / "docs" / "book").rglob("*.html"))
    for page in [site / "index.html", *book]:
        for target in targets(page):
            if site in target.parents and not target.exists():
                copy(site, target)
    # Adds links back: the book's title, and a line above each crate.
    for page in book:
        up = "../" * len(page.relative_to(site).parent.parts)
        text = page.read_text(encoding="utf-8")
        text = re.sub(r'(<h1 class="menu-title">)([^<]*)(</h1>)', rf'\1<a href="{up}index.html" {PLAIN}>\2</a>\3', text)
        page.write_text(text, encoding="utf-8")
    for page in (site / "rust").glob("candle_gpt2*/index.html"):
        text = page.read_text(encoding="utf-8")
        back = '<p><a href="../../index.html">GPT-2 in Rust: book, page, notebooks</a></p>'
        page.write_text(re.sub(r'(<section id="main-content"[^>]*>)', rf"\1{back}", text), encoding="utf-8")
    # rustdoc checks its own links.
    pages = [site / "index.html", *book]
    broken = sorted({f"{page.relative_to(site)} -> {target}" for page in pages for target in targets(page) if not target.exists()})
    if broken:
        sys.exit("links lead nowhere:\n" + "\n".join(broken))
    print(f"{len(pages)} pages, no broken link")


if __name__ == "__main__":
    main()
