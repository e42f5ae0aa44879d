"""`l3store bench`: the byte path beside the bare sockets of the same machine and beside its peers."""
