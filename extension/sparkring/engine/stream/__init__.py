"""Training on a stream: a cell that a warm gang runs for each micro-batch.

sources       micro-batches from an iterator or a watched folder
spark_source  micro-batches from a streaming DataFrame
replay_log    the micro-batches that Spark considers done, but that no checkpoint contains yet
ring          runs the cell on the gang; if the gang is lost, starts another one and restores the last checkpoint
run           one run, from its spec to its result
"""
