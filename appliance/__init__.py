"""Serve a very large mixture-of-experts model on a machine whose GPUs cannot hold it."""
