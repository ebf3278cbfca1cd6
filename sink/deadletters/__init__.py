"""Bad records: the dead-letter table and topic, and their replay."""
