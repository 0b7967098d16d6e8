"""A real browser without a network, with its requests, its errors and the foreign scripts that ran."""

from dataclasses import dataclass, field

import chromium as installed
import pytest


@pytest.fixture(scope="session")
def chromium():
    """The system's Chromium, headless."""
    path = installed.path()
    if path is None:
        pytest.skip(installed.ABSENT)
    from playwright.sync_api import (
        sync_playwright,
    )  # here: what collects every test needs no browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=False)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page, and what happened on it."""

    page: object
    asked: list = field(default_factory=list)
    complained: list = field(default_factory=list)
    tricked: list = field(default_factory=list)

    @property
    def quiet(self):
        """Whether nothing was fetched, no error was logged and no foreign script ran."""
        return (self.asked, self.complained, self.tricked) == ([], [], [])


@pytest.fixture
def opened(chromium):
    """Opens files; options are those of a browser context."""
    contexts = []

    def open_file(path, **options):
        context = chromium.new_context(
            offline=True, **({"viewport": {"width": 1200, "height": 900}} | options)
        )
        contexts.append(context)
        context.set_default_timeout(0)  # the test's own limit holds
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        found = Opened(page=context.new_page())

        def heard(message):
            if message.type in ("error", "warning") and "GL Driver" not in message.text:
                found.complained.append(message.text)

        def dismissed(dialog):
            found.tricked.append(dialog.message)
            dialog.dismiss()

        def asked(request):
            if not request.url.startswith((f"file://{path}", "data:", "blob:")):
                found.asked.append(request.url)

        for event, answer in (("console", heard), ("dialog", dismissed), ("request", asked)):
            found.page.on(event, answer)
        found.page.on("pageerror", lambda error: found.complained.append(str(error)))
        found.page.goto(f"file://{path}")
        return found

    yield open_file
    for context in contexts:
        context.close()
