"""The inside of rmq_spark: it may change with any version. Programs import the public modules beside it."""
