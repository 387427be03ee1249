"""Proofs that need more than a test: deployments of several processes or hosts under load, while they change.

Each is a command that prints a table and exits 1 where a promise was broken; none is part of ``make test``.
"""
