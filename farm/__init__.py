"""What the farm knows: models, operator tuples, measurement, the store, jobs and verdicts.

Nothing in this package knows Celery or a terminal (``cli -> tasks -> farm``, never back).
"""

__version__ = "0.1.0"
