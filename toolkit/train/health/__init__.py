"""Progress of a rank, hang detection and the failure report."""
