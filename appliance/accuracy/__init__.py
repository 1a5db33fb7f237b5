"""Whether the answers are still right: tasks, scorers, statistics of a paired comparison."""
