"""A real browser: Chromium as the system has it, driven by Playwright."""

import shutil
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--no-sandbox"]

# Chromium does not log every violation of the page's security policy, such as an eval that is caught.
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`CSP: ${event.violatedDirective} blocked ${event.blockedURI}`));
"""


def executable():
    """Return where Chromium is, None for the one that Playwright brought."""
    found = [path for name in NAMES if (path := shutil.which(name))]
    return found[0] if found else None


@contextmanager
def chromium():
    """Yield a browser; without one the tests fail, and say how to get it."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def opened(browser, report, address="", before=None, **context):
    """Return a page with a report that has been drawn, and everything it complained of or asked for."""
    page = browser.new_context(accept_downloads=True, **context).new_page()
    page.add_init_script(REPORT_VIOLATIONS)
    if before is not None:
        page.add_init_script(before)
    heard = {"errors": [], "requests": []}
    page.on("console", lambda m: heard["errors"].append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: heard["errors"].append(str(error)))
    page.on("request", lambda request: heard["requests"].append(request.url))
    page.goto(Path(report).resolve().as_uri() + address)
    page.wait_for_selector("body[data-ready=yes]", timeout=60_000)
    return page, heard
