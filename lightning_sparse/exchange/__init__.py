"""Turns all workers' payloads into the same average on every worker.

Every worker must issue the same collectives in the same order, because Gloo matches them by order. Under DDP, issue
them in the hook itself: callbacks of futures run in another order on each worker.
"""
