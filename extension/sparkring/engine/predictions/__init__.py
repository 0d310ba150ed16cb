"""Predictions: a model scores the rows of a Spark DataFrame or of Parquet files, in one process per machine or GPU."""
