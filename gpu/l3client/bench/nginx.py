"""nginx: files sent by sendfile, received by its DAV module."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from l3client.bench.contender import Handle, NotFoundError, Threaded
from l3client.bench.least_http import HttpHandle
from l3client.bench.process import Server, free_port
from l3client.bench.workload import Item, Workload

_CONFIG = """
daemon off;
{user}
worker_processes auto;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  sendfile on;
  tcp_nopush on;
  tcp_nodelay on;
  keepalive_timeout 3600;
  keepalive_requests 100000000;
  client_max_body_size 0;
  client_body_buffer_size 64k;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    root {folder}/data;
    location / {{ dav_methods PUT DELETE; }}
  }}
}}
"""


class Nginx(Threaded):
    name = "nginx"
    about = "nginx: GET by sendfile, DAV PUT to files"

    def __init__(self, work: Workload, folder: Path) -> None:
        super().__init__(work, folder)
        self._server: Server | None = None
        self._port = 0

    @property
    def server_pids(self) -> list[int]:
        return self._server.pids if self._server else []

    def launch(self) -> None:
        # Debian keeps it in sbin, which a user's PATH may leave out.
        binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
        if binary is None:
            raise NotFoundError("no nginx in PATH")
        (self.folder / "data").mkdir()
        self._port = free_port()
        # Started by root, its workers would run as another user, who cannot write here.
        user = "user root;" if os.geteuid() == 0 else ""
        config = self.folder / "nginx.conf"
        config.write_text(_CONFIG.format(folder=self.folder, port=self._port, user=user))
        self._server = Server([binary, "-c", str(config), "-p", str(self.folder)], self.folder / "log")
        self._server.wait_for_port(self._port)

    def connect(self) -> Handle:
        return HttpHandle(self._port)

    def remove(self, items: Sequence[Item]) -> None:
        for item in items:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / "data" / str(item.key))

    def halt(self) -> None:
        if self._server:
            self._server.stop()
