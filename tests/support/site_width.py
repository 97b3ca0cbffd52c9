"""Looks whether a page of the site is wider than its window: `python -m tests.support.site_width build/site`.

One headless Chromium opens all pages in a frame of 400 and of 1300 pixels. Without a browser it prints a line.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTHS = (400, 1300)
PROGRAM = """<!doctype html><body><pre id=result>unfinished</pre><script>
(async () => {
  const wide = [];
  for (const width of %s) for (const page of %s) {
    const frame = document.createElement("iframe");
    frame.style = `width: ${width}px; height: 900px; border: 0`;
    await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
    const root = frame.contentDocument.documentElement;
    if (root.scrollWidth > width) wide.push(`${page}: ${root.scrollWidth} pixels in a window of ${width}`);
    frame.remove();
  }
  document.getElementById("result").textContent = "wide: " + JSON.stringify(wide);
})();
</script></body>"""


def wide_pages(browser: str, site: Path) -> list[str]:
    """Pages that scroll sideways, with their widths."""
    pages = [path.resolve().as_uri() for path in sorted(site.rglob("*.html"))]
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.html"
        start.write_text(PROGRAM % (json.dumps(WIDTHS), json.dumps(pages)))
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-web-security",
            "--allow-file-access-from-files",
        ]
        command = [
            browser,
            *flags,
            f"--user-data-dir={folder}",
            "--virtual-time-budget=600000",
            "--dump-dom",
            start.as_uri(),
        ]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search(r"wide: (\[.*?\])</pre>", dom, re.S)
    if found is None:
        raise RuntimeError(f"{browser} opened the pages, and gave no result: {dom[:300]}")
    return [line.removeprefix(site.resolve().as_uri() + "/") for line in json.loads(found[1])]


def browser() -> str | None:
    """The installed Chromium, by its name."""
    return next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None)


if __name__ == "__main__":
    installed = browser()
    if installed is None:
        print("docs: the width of pages was not looked at: no chromium here")
        sys.exit()
    wide = wide_pages(installed, Path(sys.argv[1]))
    print("\n".join(wide) or f"docs: no page is wider than its window, at {WIDTHS} pixels")
    sys.exit(bool(wide))
