"""Evaluation with the template, parser and graders of training."""
