"""A service of the demo's own: started on a free port, stopped at the end."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_START_SECONDS = 30.0
_STOP_SECONDS = 15.0


@contextlib.contextmanager
def own_service() -> Iterator[str]:
    """The address of a service with an empty temporary data folder. Raises RuntimeError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="l3store-demo-") as folder:
        command = [sys.executable, "-m", "l3store", "serve", "--port", "0", "--data-dir", str(Path(folder) / "data")]
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Read the line that `l3store serve` prints when it is ready."""
    assert process.stdout is not None
    printed = b""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if select.select([process.stdout], [], [], 0.2)[0]:
            printed += os.read(process.stdout.fileno(), 4096)
            if match := re.search(rb"on (http://\S+?),? ", printed):
                return match[1].decode()
    said = (printed + log.read_bytes()).decode(errors="replace").strip()
    raise RuntimeError(f"l3store serve did not start (exit status {process.poll()}): {said[-2000:]}")
