"""`l3store bench`: the byte path beside the bare sockets of this machine, and beside its peers."""

from __future__ import annotations

import argparse

from l3store.cli._commands import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure the byte path beside bare sockets and peers",
        description="Start the service and every peer that is installed on free ports of loopback, in a temporary "
        "folder, and measure them in interleaved rounds, every byte compared. Prints GB/s, ratios paired by round, "
        "latencies, CPU seconds for each GB, memory, bars, and from how many tokens on a hit pays. Exits 1 if a byte "
        "differs.",
    )
    parser.add_argument("--rounds", type=int, help="rounds after the one that warms [7; 2 with --quick]")
    parser.add_argument("--quick", action="store_true", help="small and few: to see that it works, not how fast")
    parser.add_argument(
        "--peers",
        default="all",
        help="all, none, or some of nginx,redis,lmcache,mooncake,fastapi,local [all]; those not installed are named",
    )
    parser.add_argument(
        "--cases",
        default="all",
        help="all, or some of get/1,get/4,put/1,put/4,read,write,small,layers,match,many [all]",
    )
    parser.add_argument(
        "--objects",
        type=int,
        metavar="N",
        help="tiny objects that the case many stores, which takes minutes [1000000; 2000 with --quick]",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--strict", action="store_true", help="exit 1 where a measured bar is missed")
    parser.add_argument(
        "--prefill-tokens-per-second",
        type=float,
        default=8000.0,
        metavar="RATE",
        help="what computing a prompt does, for the break-even [8000]",
    )
    parser.add_argument("--ram", default="2Gi", help="the service's --ram [2Gi]")
    parser.add_argument("--folder", help="where the temporary folder goes: the disk that is measured")
    parser.add_argument("--lmcache-python", metavar="PATH", help="a Python that has lmcache [this one]")
    parser.add_argument("--mooncake-python", metavar="PATH", help="a Python that has mooncake [this one]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from l3client.bench import cli

    return cli.run(args)
