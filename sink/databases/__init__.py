"""Reads tables of databases: all rows of one moment by JDBC, and parts of a table by binary COPY."""
