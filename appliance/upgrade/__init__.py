"""From one recorded deployment to the next, or back by itself."""
