"""What `--measure` does: real copies, real pins, real reads, each with a limit."""
