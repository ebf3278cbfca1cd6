"""Watches a run: keeps what it tells (`sink.table.observer`) in bounded memory, and serves it over HTTP.

    server.py    HTTP, with limits: what is served is asked by people and Prometheus, and must not disturb the job
    state.py     what is known of the sink and its tables, and the last hour
    metrics.py   the same for Prometheus
    page/        the page for people: it reads `/state.json`

`sink.run` knows nothing of this package. `sink.console.run` puts both together.
"""
