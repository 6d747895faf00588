"""The exchange, which turns the payloads of all workers into the same averaged gradient on every worker.

Only this package issues collectives. Every worker must issue them in the same order, and only from the body of DDP's
communication hook. Gloo matches collectives by order, and the order of a future's callbacks differs between workers.
"""
