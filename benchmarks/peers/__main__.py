"""python -m benchmarks.peers list | prepare NAME FOLDER KIND | measure NAME FOLDER KIND SECONDS | self-check

Run from the repository's root, in .venv-bench (MosaicML: .venv-mosaic). `measure` prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from . import KINDS, PEERS, PICKS, measure, measure_cold, prepared
from .self_check import check_all


def main() -> int:
    given = _arguments()
    if given.command == "list":
        for peer in (PEERS | PICKS).values():
            print(f"{peer.name}\t{peer.version}\t{peer.unavailable() or peer.settings}")
    elif given.command == "prepare":
        print(prepared((PEERS | PICKS)[given.name], given.folder, given.kind))
    elif given.command == "measure":
        peer = (PEERS | PICKS)[given.name]
        if given.cold:
            print(json.dumps(measure_cold(peer, given.folder, given.kind)))
        else:
            print(json.dumps(measure(peer, given.folder, given.kind, given.seconds)))
    else:
        return _self_check()
    return 0


def _self_check() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = check_all(Path(folder))
    for name, verdict in found.items():
        print(f"{name:30} {verdict}")
    return int(any(verdict.startswith("WRONG") for verdict in found.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    commands.add_parser("self-check")
    for name in ("prepare", "measure"):
        command = commands.add_parser(name)
        command.add_argument("name", choices=[*PEERS, *PICKS])
        command.add_argument("folder", type=Path)
        command.add_argument("kind", choices=list(KINDS))
        if name == "measure":
            command.add_argument("seconds", type=float)
            command.add_argument("--cold", action="store_true", help="one epoch from evicted files instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
