"""DataParallel: one process, several devices."""
