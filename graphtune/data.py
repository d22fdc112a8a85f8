"""The sweep that ships with graphtune."""

from __future__ import annotations

from pathlib import Path

from graphtune.errors import InputError
from graphtune.store import RUN_FILE

SHIPPED = "llama-3.1-8b-nvidia-h200"


def shipped_sweep() -> Path:
    """Folder of the H200 sweep: in an installed package beside this module, in a source tree under reports/."""
    package = Path(__file__).resolve().parent
    places = (package / "shipped" / SHIPPED, package.parent / "reports" / SHIPPED)
    for place in places:
        if (place / RUN_FILE).is_file():
            return place
    raise InputError(
        "the sweep that ships with graphtune is missing from this installation",
        where=str(places[0]),
        action="Install graphtune again, or name a sweep folder.",
    )


if __name__ == "__main__":
    print(shipped_sweep())
