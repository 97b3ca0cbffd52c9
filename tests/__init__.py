"""The tests, in folders that mirror the package: a package of their own, so that no other `tests` is imported."""
