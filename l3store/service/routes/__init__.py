"""The wire's routes, by resource. A route parses, calls and maps errors."""

from __future__ import annotations

from l3store.service.routes import namespaces, objects, pages, status

ROUTERS = (status.router, namespaces.router, objects.router, pages.router)

__all__ = ["ROUTERS"]
