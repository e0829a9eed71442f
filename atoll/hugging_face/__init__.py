"""Hugging Face's `transformers.Trainer` as a Job: what it trains, how, and who is told of it."""
