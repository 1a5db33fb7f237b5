"""A model on disk: read its headers, or make a small valid one."""
