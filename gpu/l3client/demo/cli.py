"""`l3store demo`, where torch is installed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence

from tqdm import tqdm

from l3client.demo.decoder import LatentConfig, ModelConfig
from l3client.demo.proof import PAGE_SIZE, Plan, Row, plan_for, prove
from l3client.demo.service import own_service
from l3client.transport import L3Client
from l3store.errors import L3Error

_MODELS = {"gqa": ModelConfig(), "mla": ModelConfig(latent=LatentConfig())}


def run(args: argparse.Namespace) -> int:
    """Prove it; 0 where everything is equal, 1 where something differs or failed, 2 for arguments out of range."""
    if args.tokens <= PAGE_SIZE or args.generate < 1:
        print(f"l3store demo: needs more than {PAGE_SIZE} tokens and at least 1 to generate", file=sys.stderr)
        return 2
    names = list(_MODELS) if args.model == "both" else [args.model]
    plans = [plan_for(name, _MODELS[name], tokens=args.tokens, generate=args.generate) for name in names]
    try:
        with contextlib.ExitStack() as stack:
            url = args.url or stack.enter_context(own_service())
            client = stack.enter_context(L3Client(url))
            rows = _prove_all(plans, client)
    except (L3Error, RuntimeError, ValueError) as error:
        print(f"l3store demo: {error}", file=sys.stderr)
        return 1
    passed = all(row.passed for row in rows)
    if args.json:
        print(json.dumps({"passed": passed, "rows": [dataclasses.asdict(row) for row in rows]}))
    else:
        print(_table(rows))
        print(_verdict(passed, args.tokens, args.generate))
    return 0 if passed else 1


def _prove_all(plans: Sequence[Plan], client: L3Client) -> list[Row]:
    rows: list[Row] = []
    steps = sum(plan.steps for plan in plans)
    # Shown after a second, and only to a person.
    with tqdm(total=steps, delay=1, leave=False, unit="step", file=sys.stderr, disable=None) as bar:
        begun = 0

        def progress(what: str) -> None:
            nonlocal begun
            bar.update(1 if begun else 0)
            begun += 1
            bar.set_description(what)

        for plan in plans:
            rows += prove(plan, client, progress)
        bar.update(1)
    return rows


def _table(rows: Sequence[Row]) -> str:
    head = ("model", "who", "deployment", "objects", "MB", "hit tokens", "GB/s", "KV bytes", "max |dlogit|", "tokens")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.model,
        row.role,
        row.topology,
        str(row.objects),
        f"{row.bytes / 1e6:.1f}",
        str(row.hit_tokens) if row.role == "read" else "-",
        f"{row.bytes / row.seconds / 1e9:.2f}",
        {None: "-", True: "equal", False: "DIFFER"}[row.kv_equal],
        f"{row.difference:.1e}",
        "equal" if row.tokens_equal else "DIFFER",
    )


def _verdict(passed: bool, tokens: int, generate: int) -> str:
    if not passed:
        return "FAILED: a deployment that restored its KV does not give what computing everything gives."
    return (
        f"Every deployment restored what one had written, byte for byte, and its next {generate} tokens after a prompt "
        f"of {tokens} are those of computing everything."
    )
