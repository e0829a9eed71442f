"""Runtime: what runs a job. Alone on one machine for now; the distributed modes come next."""
