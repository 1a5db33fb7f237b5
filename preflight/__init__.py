"""What this machine is, and whether it is good enough. No torch, no model."""
