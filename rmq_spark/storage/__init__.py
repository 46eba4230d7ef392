"""Keeps the tables and files of a commit log on a store. :mod:`rmq_spark.commitlog` knows what they mean."""
