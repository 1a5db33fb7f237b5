"""Text and numbers of the machine to facts. A probe never judges."""
