"""A headless Chromium for tests: pages at a width and in a theme, what they look like and what they complain about."""

from __future__ import annotations

import base64
import os
import re
import shutil
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = "GRAPHTUNE_SCREENSHOTS"
"""Environment variable: a folder that gets every page's screenshot."""


class Chromium:
    """One browser process. Raises FileNotFoundError where Chromium or its driver is not installed."""

    def __init__(self, home: Path) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = _installed(*NAMES)
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
        for flag in (*flags, "--disable-background-networking", f"--user-data-dir={home / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.downloads = home / "downloads"
        self.driver = webdriver.Chrome(
            options=options,
            service=webdriver.ChromeService(_installed("chromedriver"), env={**os.environ, "HOME": str(home)}),
        )
        self.driver.set_script_timeout(30)
        self.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        self.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

    def cdp(self, command: str, **parameters: Any) -> dict[str, Any]:
        """One command of the Chrome DevTools Protocol."""
        return self.driver.execute_cdp_cmd(command, parameters)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, page: Path, width: int = 1280, theme: str = "light", media: str = "screen") -> None:
        """Load the page anew; earlier messages of the console are dropped."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.cdp("Emulation.setEmulatedMedia", media=media, features=features)
        self.cdp("Emulation.setFocusEmulationEnabled", enabled=True)  # a page out of focus may not read the clipboard
        self.console()
        self.driver.get(page.as_uri())

    def console(self) -> list[str]:
        """Messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def screenshot(self, name: str) -> bytes:
        """The whole page as PNG, also stored where ``GRAPHTUNE_SCREENSHOTS`` names a folder."""
        size = self.cdp("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        content = base64.b64decode(answer["data"])
        if folder := os.environ.get(SCREENSHOTS):
            target = Path(folder) / f"{re.sub(r'[^a-z0-9]+', '-', name)}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return content

    def close(self) -> None:
        self.driver.quit()


def _installed(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError(f"{names[0]} is not installed; on Debian: apt-get install chromium chromium-driver")
    return found
