"""l3client: the part of l3store that lives inside serving workers."""
