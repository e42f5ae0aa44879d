"""The wire's routes, by resource. A route parses, calls and maps errors."""

from __future__ import annotations

from l3store.service.routes import namespaces, objects, pages, status

# The byte path first: routes are tried in order.
ROUTERS = (objects.router, pages.router, namespaces.router, status.router)

__all__ = ["ROUTERS"]
