"""The kernels against this machine's own ceilings, a script for each claim."""
