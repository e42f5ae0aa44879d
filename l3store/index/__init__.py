"""What is stored: registrations, coverage, recency, eviction, and reads over them."""

from __future__ import annotations

from l3store.index.pages import Usage
from l3store.index.reader import PageBytes, PageQuery, Reader
from l3store.index.reading import Order
from l3store.index.registry import Near, Registration
from l3store.index.store import Store

__all__ = ["Near", "Order", "PageBytes", "PageQuery", "Reader", "Registration", "Store", "Usage"]
