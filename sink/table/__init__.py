"""One table: what its micro-batches write and commit, and what is done between and beside them."""
