"""`l3store demo`: prove on real attention that differently cut deployments share their KV."""

from __future__ import annotations

import argparse
import sys

from l3store.cli._commands import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="one deployment writes KV, others read it: prove that nothing changes",
        description="Start the service on a free port in a temporary folder. A TP4/PP2 deployment of a small decoder "
        "prefills a prompt and backs its pages up; deployments cut differently restore them over HTTP and produce the "
        "next tokens. Exits non-zero if a byte, a logit beyond tolerance or a token differs.",
    )
    parser.add_argument("--tokens", type=int, default=2088, help="length of the prompt [2088]")
    parser.add_argument("--generate", type=int, default=16, help="tokens to produce after it [16]")
    parser.add_argument("--model", choices=["gqa", "mla", "both"], default="both", help="which decoder [both]")
    parser.add_argument("--url", help="use a running service instead of starting one")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        from l3client.demo import cli
    except ImportError as error:
        print(f"l3store demo needs torch and numpy ({error}): pip install 'l3store[demo]'", file=sys.stderr)
        return 2
    return cli.run(args)
