"""Which expert lives where, and why. Pure: no machine, no torch, no clock."""
