"""`python -m l3store`."""

from __future__ import annotations

import sys

from l3store.cli import main

sys.exit(main())
