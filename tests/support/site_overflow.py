"""Looks for elements that overflow, on the site and in reports: `python -m tests.support.site_overflow build/site`.

One headless Chromium opens all pages and pictures of a folder in frames of 400 and of 1300 pixels, beside a planner's
report and a timeline, which it has the package write. Without a browser it prints a line.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from urllib.parse import unquote

import neuronx_dist as nxd
from neuronx_dist.__main__ import main
from neuronx_dist.planner.report import report

__all__ = ["browser", "overflows", "write_reports"]

WIDTHS = (400, 1300)
# Overflow is what no scroll bar of an element reaches: a box or a line of text that leaves its container, is hidden by
# it, or leaves the window; text beyond the edge of its picture. A theme's negative margins and drawers are none.
PROGRAM = """<!doctype html><body><pre id=result>unfinished</pre><script>
function overflows(doc, width) {
  const view = doc.defaultView, found = [], root = doc.documentElement, range = doc.createRange();
  const style = element => view.getComputedStyle(element);
  const scrolls = element => /auto|scroll/.test(style(element).overflowX);
  const add = (element, words) => found.push([element, words]);
  const leaves = (inner, outer) => inner.right > outer.right + 1 || inner.left < outer.left - 1;
  const span = box => `${Math.round(box.left)} to ${Math.round(box.right)}`;
  const window_ = {left: 0, right: width}, at = `at a window of ${width}`;
  if (root.scrollWidth > width && root.tagName !== "svg") add(root, `${root.scrollWidth} pixels, ${at}`);
  for (const element of root.querySelectorAll("*")) {
    const box = element.getBoundingClientRect(), picture = element.ownerSVGElement, own = style(element);
    if (!box.width || !box.height || own.visibility === "hidden") continue;
    if (picture) {
      const edge = picture.getBoundingClientRect();
      if (element.tagName === "text" && (leaves(box, edge) || box.bottom > edge.bottom + 1 || box.top < edge.top - 1))
        add(element, `beyond the edge of its picture, ${at}`);
      continue;
    }
    let drawer = false, scrolled = false;  // a drawer waits outside of the window
    for (let outer = element; outer && outer !== root; outer = outer.parentElement) {
      drawer ||= style(outer).position === "fixed";
      scrolled ||= outer !== element && scrolls(outer);
    }
    if (!drawer && !scrolled && leaves(box, window_)) add(element, `${span(box)}, ${at}`);
    const parent = element.parentElement, inline = element => /^(inline|contents)$/.test(style(element).display);
    const placed = /absolute|fixed|sticky/.test(own.position) || own.float !== "none";
    const margins = [own.marginLeft, own.marginRight].some(margin => parseFloat(margin) < 0);
    if (parent && parent !== root && !placed && !margins && !inline(element) && !inline(parent) && !scrolls(parent) &&
        leaves(box, parent.getBoundingClientRect()))
      add(element, `${span(box)}, in ${span(parent.getBoundingClientRect())}, ${at}`);
    const {clientWidth, scrollWidth, clientHeight, scrollHeight} = element;
    if (/hidden|clip/.test(own.overflowX) && clientWidth > 1 &&  // of 1 pixel: text for screen readers
        (scrollWidth > clientWidth + 1 || scrollHeight > clientHeight + 1))
      add(element, `${scrollWidth} x ${scrollHeight} pixels cut to ${clientWidth} x ${clientHeight}, ${at}`);
    let block = element;
    while (inline(block) && block.parentElement) block = block.parentElement;
    if (scrolls(block)) continue;
    for (const node of element.childNodes) if (node.nodeType === 3 && node.data.trim()) {
      range.selectNodeContents(node);
      const {left, right} = block.getBoundingClientRect(), indent = Math.min(0, parseFloat(style(block).textIndent));
      const line = [...range.getClientRects()].find(line => leaves(line, {left: left + indent, right}));
      if (line) add(element, `text ${span(line)}, in ${span({left, right})}, ${at}`);
    }
  }
  const innermost = found.filter(([element]) => !found.some(([other]) => other !== element && element.contains(other)));
  return innermost.map(([element, words]) => {
    const name = [element.tagName.toLowerCase(), ...element.classList].join(".");
    const text = element.textContent.trim().replace(/\\s+/g, " ").slice(0, 40);
    return `<${name}> ${text && JSON.stringify(text) + ": "}${words}`;
  });
}
(async () => {
  const lines = [];
  for (const width of %s) for (const page of %s) {
    const frame = document.createElement("iframe");
    frame.style = `width: ${width}px; height: 900px; border: 0`;
    await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
    const name = page.split("/").slice(-2).join("/");
    lines.push(...overflows(frame.contentDocument, width).map(line => `${name}: ${line}`));
    frame.remove();
  }
  document.getElementById("result").textContent = "result " + btoa(encodeURIComponent(JSON.stringify(lines)));
})();
</script></body>"""


def overflows(browser: str, folders: Sequence[Path]) -> list[str]:
    """Returns a line for each innermost element that overflows, with its page, its words and the sizes."""
    files = sorted(path for folder in folders for kind in ("html", "svg") for path in folder.rglob(f"*.{kind}"))
    pages = [path.resolve().as_uri() for path in files]
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.html"
        start.write_text(PROGRAM % (json.dumps(WIDTHS), json.dumps(pages)))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security"]
        flags += ["--allow-file-access-from-files", f"--user-data-dir={folder}"]
        command = [browser, *flags, "--virtual-time-budget=600000", "--dump-dom", start.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search(r"result ([\w+/=]+)</pre>", dom)
    if found is None:
        raise RuntimeError(f"{browser} opened the pages, and gave no result: {dom[:300]}")
    lines: list[str] = json.loads(unquote(b64decode(found[1]).decode()))
    return lines


def write_reports(folder: Path) -> None:
    """Writes the pages that users get from commands: `plan --report`, `timeline --out`."""
    plans = nxd.plan("llama-70b", global_batch=256, seq_len=4096, cluster="h100", devices=64)
    (folder / "plan.html").write_text(report(plans))
    words = "timeline --schedule 1f1b --schedule zb_v --stages 4 --microbatches 8".split()
    with redirect_stdout(StringIO()):
        assert main([*words, "--out", str(folder / "timeline.html"), "--out", str(folder / "timeline.svg")]) == 0


def browser() -> str | None:
    """The installed Chromium, by its name."""
    return next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None)


if __name__ == "__main__":
    installed = browser()
    if installed is None:
        print("docs: nobody has looked for overflow: no chromium here")
        sys.exit()
    with tempfile.TemporaryDirectory() as reports:
        write_reports(Path(reports))
        lines = overflows(installed, [Path(sys.argv[1]), Path(reports)])
    print("\n".join(lines) or f"docs: nothing overflows or is cut, at {WIDTHS} pixels")
    sys.exit(bool(lines))
