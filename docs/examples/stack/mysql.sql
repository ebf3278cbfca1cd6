CREATE TABLE customers (
    id bigint PRIMARY KEY, name varchar(100) NOT NULL, city varchar(100), since datetime(6) NOT NULL);

INSERT INTO customers VALUES
    (1, 'Ada', 'London', '2026-01-02 03:04:05.123456'),
    (2, 'Zoë', NULL, '2026-02-03 04:05:06');
