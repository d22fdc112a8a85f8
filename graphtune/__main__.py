from __future__ import annotations

from graphtune.cli.app import main

main()
