"""Hook of the docs builder: the page of a wrong address works wherever the site is served.

A server sends 404.html for an address in any folder, so its links cannot be relative to itself; ProperDocs makes them
absolute, which is wrong under a path such as /finetune-toolkit/. A script finds the site's folder: the nearest one
above the wrong address that has the search index.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig

FIND_THE_SITE = """<script>
var site = location.pathname
do {
  site = site.slice(0, site.replace(/\\/$/, "").lastIndexOf("/") + 1)
  var request = new XMLHttpRequest()
  request.open("HEAD", site + "search/search_index.json", false)
  request.send()
} while (request.status !== 200 && site !== "/")
document.write('<base href="' + encodeURI(site) + '">')
</script>"""
# The theme resolves its own base against the page's address, not against <base>.
SET_THE_BASE = """<script>
var config = document.getElementById("__config")
config.textContent = JSON.stringify({ ...JSON.parse(config.textContent), base: location.origin + site })
</script>"""
WHAT_NOW = (
    '<p>There is no such page here. Search for a word of it, or begin at <a href="index.html">the first page</a>. '
    'A failed run: <a href="how-to/my-run-failed.html">my run failed</a>.</p>'
)
CONFIG = re.compile(r'<script id="__config".*?</script>', re.DOTALL)


def on_post_build(config: MkDocsConfig) -> None:
    page = Path(config.site_dir) / "404.html"
    text = re.sub(r'((?:href|src)=")/(?!/)', r"\1", page.read_text("utf-8"))
    text = text.replace("<head>", f"<head>{FIND_THE_SITE}", 1)
    text = text.replace("<h1>404 - Not found</h1>", f"<h1>Page not found</h1>{WHAT_NOW}", 1)
    page.write_text(CONFIG.sub(lambda found: found[0] + SET_THE_BASE, text, count=1), "utf-8")
