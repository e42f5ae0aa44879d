"""Bytes between a service and the caller's memory."""

from __future__ import annotations

from l3client.transport.client import Body, L3Client, PagesRead, Written
from l3client.transport.pagewire import Order, Part
from l3client.transport.timeouts import Timeouts

__all__ = ["Body", "L3Client", "Order", "PagesRead", "Part", "Timeouts", "Written"]
