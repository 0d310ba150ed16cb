"""Predictions: a model that scores the rows of a Spark DataFrame, in one process per machine."""
