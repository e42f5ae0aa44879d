"""The `l3store` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from l3store import __version__
from l3store.cli import bench, check, demo, plan, schemas, serve
from l3store.config import ConfigError
from l3store.layout import LayoutError

_COMMANDS = (serve, demo, bench, plan, check, schemas)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(prog="l3store", description="A third-level KV cache for LLM serving.")
    parser.add_argument("--version", action="version", version=f"l3store {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in _COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except (ConfigError, LayoutError) as error:
        print(f"l3store: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status
