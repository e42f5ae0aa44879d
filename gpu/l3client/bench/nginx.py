"""nginx: files sent by sendfile, received by its DAV module."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence

from l3client.bench.contender import Handle, NotFoundError
from l3client.bench.least_http import HttpHandle
from l3client.bench.served import Served
from l3client.bench.workload import Item

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


class Nginx(Served):
    name = "nginx"
    about = "nginx: GET by sendfile, DAV PUT to files"

    def command(self) -> list[str]:
        # Debian keeps it in sbin, which a user's PATH may leave out.
        binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
        if binary is None:
            raise NotFoundError("no nginx in PATH")
        (self.folder / "data").mkdir()
        # Started by root, its workers would run as another user, who cannot write here.
        user = "user root;" if os.geteuid() == 0 else ""
        config = self.folder / "nginx.conf"
        config.write_text(_CONFIG.format(folder=self.folder, port=self.port, user=user))
        return [binary, "-c", str(config), "-p", str(self.folder)]

    def connect(self) -> Handle:
        return HttpHandle(self.port)

    def remove(self, items: Sequence[Item]) -> None:
        for item in items:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder / "data" / str(item.key))
