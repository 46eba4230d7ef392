"""How the tables and files of a commit log are kept on a store: what they mean is :mod:`rmq_spark.commitlog`'s."""
