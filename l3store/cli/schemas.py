"""`l3store schemas`: write the JSON Schemas and the OpenAPI document that the code describes."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from l3store.cli._commands import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("schemas", help="write openapi.json and the JSON Schemas", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, document in generate().items():
        (args.folder / name).write_text(document, encoding="utf-8")
        print(args.folder / name)
    return 0


def generate() -> dict[str, str]:
    """File names and contents."""
    from l3store.backend import DiskBackend
    from l3store.config import Settings
    from l3store.index import Store
    from l3store.service import create_app
    from l3store.service.shapes import NamespaceBody

    with tempfile.TemporaryDirectory() as folder:
        backend = DiskBackend(Path(folder))
        openapi = create_app(Store(backend, capacity=1)).openapi()
        asyncio.run(backend.close())
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    documents = {
        "openapi.json": openapi,
        "namespace.schema.json": {**dialect, **NamespaceBody.model_json_schema()},
        "config.schema.json": {**dialect, **Settings.model_json_schema(mode="validation")},
    }
    return {name: json.dumps(document, indent=1) + "\n" for name, document in documents.items()}
