"""Bad records: the dead-letter table and topic."""
