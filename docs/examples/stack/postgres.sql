CREATE TABLE orders (
    id bigint PRIMARY KEY, customer bigint NOT NULL, status text NOT NULL, amount numeric(12,2),
    placed timestamptz NOT NULL DEFAULT now());
CREATE TABLE lines (
    order_id bigint, line int, item text NOT NULL, price numeric(10,2) NOT NULL, PRIMARY KEY (order_id, line));

INSERT INTO orders (id, customer, status, amount)
SELECT n, n % 10 + 1, 'new', n * 1.25 FROM generate_series(1, 100) n;
INSERT INTO lines SELECT n, m, 'item ' || m, n * 0.25 + m FROM generate_series(1, 100) n, generate_series(1, 3) m;
