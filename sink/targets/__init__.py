"""The tables that the sink writes: the seam to table formats (`base`), and a package for each format."""
