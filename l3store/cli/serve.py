"""`l3store serve`: start the service."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from l3store import __version__
from l3store.backend import BufferPool, DiskBackend, RamTier
from l3store.cli._commands import Commands
from l3store.config import ENV_PREFIX, Settings, default_ram, load_settings
from l3store.index import Store


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="start the service", description="Start the service.")
    for name, field in Settings.model_fields.items():
        default = "" if field.is_required() or field.default is None or field.default_factory else f" [{field.default}]"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=name.rpartition("_")[2].upper(),
            help=f"{field.description}{default}; also {ENV_PREFIX}{name.upper()}".replace("%", "%%"),
        )
    parser.add_argument("--config", type=Path, help=f"TOML file with these settings; also {ENV_PREFIX}CONFIG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from l3store.service import create_app
    from l3store.service.server import listen
    from l3store.service.server import run as run_server

    config = args.config or (Path(os.environ[f"{ENV_PREFIX}CONFIG"]) if f"{ENV_PREFIX}CONFIG" in os.environ else None)
    flags = {name: getattr(args, name) for name in Settings.model_fields}
    settings = load_settings(flags, os.environ, config)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        print(f"l3store: cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    try:
        backend = DiskBackend(settings.data_dir, ack=settings.ack)
    except OSError as error:
        print(f"l3store: cannot use {settings.data_dir}: {error.strerror or error}", file=sys.stderr)
        listener.close()
        return 1
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    pool = BufferPool(settings.ram or default_ram())
    tier = RamTier(backend, pool, ack=settings.ack, hot_bytes=settings.hot)
    store = Store(backend, capacity=settings.capacity, tier=tier)

    def announce() -> None:
        used = store.index.total.disk_bytes
        print(
            f"l3store {__version__} on {url}, data in {settings.data_dir}: {used / 1e9:.1f} GB of up to "
            f"{store.capacity / 1e9:.1f} GB, {pool.total / 1e9:.1f} GB of RAM, ack {settings.ack}",
            flush=True,
        )

    # uvicorn finishes what is in flight on SIGTERM, then hands the signal on. To be stopped is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run_server(create_app(store, on_ready=announce), listener, loop=settings.loop, log_level=settings.log_level)
    return 0
