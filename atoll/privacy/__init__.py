"""What sites that train together keep from one another, and from whoever carries their bytes: docs/privacy.md.

Which tensors may leave a site and a log of those that did (`border.py`, `audit_log.py`); sums of updates of which nobody sees a single one
(`masked_sum.py`); updates that are clipped and noised (`noised_update.py`, `accounting.py`); updates that are refused or bounded
(`robust.py`). Nothing here knows of sockets or processes; only the audit log touches files.
"""
