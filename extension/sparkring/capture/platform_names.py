"""What to use in place of the names that Databricks defines in every notebook."""

INSTEAD_OF = {
    "spark": "Ranks have no SparkSession. Read the data in the notebook, where `spark = sparkring.spark()` defines "
    "`spark`, and use shards(df), sparkring.partitions(df) or %%barrier --data df.",
    "sc": "Ranks have no SparkContext. In the notebook, it is `sparkring.spark().sparkContext`.",
    "dbutils": "Only Databricks has `dbutils`. Use os and shutil in place of dbutils.fs, os.environ in place of "
    "dbutils.secrets and dbutils.widgets, and sparkring.local_path('dbfs:/x') for a path.",
}
