"""Weights on disk: fetched once, proved by sha256, switched in an instant. No torch, no engine."""
