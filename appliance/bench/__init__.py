"""Speed of one stream, how many streams hold it, and how many people that is."""
