"""Tables and files on a store: compare-and-set, Delta, Parquet, seals. It does not know what they mean."""
