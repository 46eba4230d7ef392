"""All that runs in Spark: the sink, the source, ``foreachBatch``. The only room that imports pyspark."""
