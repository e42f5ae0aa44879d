"""A real decoder over page pools, cut any way: what ``l3store demo`` proves the shared layout with."""
