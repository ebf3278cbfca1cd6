"""Compares tables with their sources (`rowdelta verify`)."""
